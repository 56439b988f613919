"""All compiled loops: numba's on a CPU, Triton's on a GPU. Nothing of ours is imported here but errors."""
