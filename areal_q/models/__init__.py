"""Decoder-only transformers of the Qwen2, Qwen3 and Llama families."""
