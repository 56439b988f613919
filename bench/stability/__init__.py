"""The laboratory: which objectives survive quantized rollouts."""
