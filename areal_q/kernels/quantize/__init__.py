"""Quantizing weights and activations in one pass: numba on a CPU, Triton on a GPU."""
