"""Benchmarks: ours beside a peer and the physical limit, one module a claim."""
