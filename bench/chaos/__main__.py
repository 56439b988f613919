"""`python -m bench.chaos`: see bench/chaos/storm.py."""

from bench.chaos.storm import main

main()
