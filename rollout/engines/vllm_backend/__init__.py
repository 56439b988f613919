"""vLLM as a generation backend."""
