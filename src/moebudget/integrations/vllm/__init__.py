"""vLLM: a plugin that caps the experts of its decode steps. See docs/vllm.md."""
