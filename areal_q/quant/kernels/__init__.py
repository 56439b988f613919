"""Kernels behind the number formats: numba on a CPU, Triton and FP8 products on a GPU."""
