"""Types of the fixtures in tests/conftest.py that make something."""

from collections.abc import Callable

from areal_q.config import Run
from learner.data.packing import Sample

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list[Sample]]
