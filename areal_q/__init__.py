"""AReaL-Q: asynchronous off-policy RL for language models with quantized rollouts."""

__version__ = "0.1.0"
