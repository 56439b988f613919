"""Types of the fixtures in tests/conftest.py that make something."""

from collections.abc import Callable

from areal_q.config import Run
from areal_q.messages import Group
from areal_q.weights.version import WeightVersion
from learner.data.packing import Sample

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list[Sample]]
MakeGroup = Callable[..., Group]
MakeVersion = Callable[..., WeightVersion]
