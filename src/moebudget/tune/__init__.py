"""Search for the policy and budget that meet a target, and the config file with the evidence for the choice."""
