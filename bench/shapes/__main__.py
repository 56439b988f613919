"""Runs the sections: python -m bench.shapes."""

from bench.shapes.run import main

main()
