"""The OpenAI-compatible endpoint of a worker."""
