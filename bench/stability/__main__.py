"""`python -m bench.stability`: see bench/stability/run.py."""

from bench.stability.run import main

main()
