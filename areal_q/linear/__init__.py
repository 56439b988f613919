"""Products x · Wᵀ with published weights: the definitions, the fast ones on a CPU, and FP8 on a GPU."""
