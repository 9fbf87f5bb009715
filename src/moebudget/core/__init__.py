"""The contract: a batch of router outputs, the three parts of a policy, statistics, and one layer's router."""
