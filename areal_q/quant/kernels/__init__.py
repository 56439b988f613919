"""Kernels behind the number formats: numba on a CPU, Triton on a GPU."""
