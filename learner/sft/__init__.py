"""Supervised training as a run of its own: `areal-q sft`."""
