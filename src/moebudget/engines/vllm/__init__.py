"""Plugin for vLLM that caps the experts fetched by decode steps. See docs/vllm.md."""
