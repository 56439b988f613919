"""`python -m bench.gpu`: see bench/gpu/run.py."""

from bench.gpu.run import main

main()
