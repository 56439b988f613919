"""`python -m areal_q`: the same as `areal-q`."""

from areal_q.cli import main

main()
