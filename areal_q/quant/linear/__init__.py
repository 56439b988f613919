"""Linear layers on published weights: plain, packed for a CPU, and FP8 products."""
