"""Statistics of evaluations, and the public benchmarks that papers report."""
