"""Which policy and budget: a target, a search with few evaluations, and a config with the evidence inside."""
