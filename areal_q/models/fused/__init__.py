"""The decoder's forward and backward pass in bfloat16 on a CPU."""
