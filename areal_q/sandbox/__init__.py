"""A model's code, run where it can reach nothing: no network, no files, no other process. Imports no torch."""

from areal_q.sandbox.run_code import Ran, run_python

__all__ = ["Ran", "run_python"]
