"""Sticky scales: a range changes only when it must, so that codes and scales stay put between versions.

Recomputed for each version, nearly every scale changes a little each time, and with it some codes whose
weights did not move: bytes of a delta that carry no information. With a bound d a range r stays as long
as the measured range m is covered by it and not much smaller,

    r / (1 + d)² ≤ m ≤ r,    and otherwise becomes    r = m · (1 + d)

in the middle between both ends, so that a weight that goes up and down does not make its scale do the
same (hysteresis). The price: ranges are up to (1 + d)² larger than measured, on average about 1 + d, and
so is the error of formats of whole numbers; floats lose hardly anything. What is published remains exact
in itself: engines read codes and scales as they come.

State lives with the publisher and in no checkpoint. After a restart ranges start from measured ones: the
version that is published again differs in codes from that of before, and so in its digest, by which
tokens are told apart (learner/lineage.py). The learner's step depends on its own weights and on logged
tokens only, so that a replay is bit for bit the same whatever scales were published. What recomputes
published weights from a checkpoint alone (the doctor, `areal-q eval`) uses measured ranges.
"""

import torch
from torch import Tensor

from areal_q.quant.base import Ranges


class StickyRanges:
    """A policy for `plan.quantize_state`, with the ranges in use of every parameter.

    Raises ValueError unless `drift` is positive.
    """

    def __init__(self, drift: float) -> None:
        if not drift > 0:
            raise ValueError(f"the drift bound of sticky scales must be positive, not {drift}")
        self._room = 1.0 + drift
        self._used: dict[str, Ranges] = {}

    def __call__(self, name: str, ranges: Ranges) -> Ranges:
        used = self._used.get(name)
        if used is None:
            new = Ranges(ranges.blocks * self._room, ranges.whole * self._room)
        else:
            new = Ranges(
                self._kept(used.blocks, ranges.blocks), self._kept(used.whole, ranges.whole)
            )
        self._used[name] = new
        return new

    def _kept(self, used: Tensor, measured: Tensor) -> Tensor:
        stays = (measured <= used) & (measured * self._room**2 >= used)
        return torch.where(stays, used, measured * self._room)
