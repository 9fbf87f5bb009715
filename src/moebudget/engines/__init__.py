"""Engines that run a model under a policy: transformers and vLLM."""
