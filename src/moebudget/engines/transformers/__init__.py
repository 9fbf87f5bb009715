"""Engine transformers: attach a policy, observe routes, keep experts in host memory."""
