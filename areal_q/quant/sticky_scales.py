"""Sticky scales: a range changes only when it must, so that codes and scales stay put between versions.

Recomputed for each version, nearly every scale changes a little each time, and with it some codes whose
weights did not move: bytes of a delta that carry no information. With a bound d a range r stays as long
as the measured range m is covered by it and not much smaller,

    r / (1 + d)² ≤ m ≤ r,    and otherwise becomes    r = m · (1 + d)

in the middle between both ends, so that a weight that goes up and down does not make its scale do the
same (hysteresis). The price: ranges are up to (1 + d)² larger than measured, on average about 1 + d, and
so is the error of formats of whole numbers; floats lose hardly anything. What is published remains exact
in itself: engines read codes and scales as they come.

So what is published depends on what was before, and the ranges in use are part of a checkpoint: 4 bytes a
block (int8: of an output, nvfp4: of 16 weights). Ranges once chosen for some weights stay as they are for the
same weights, so that a resumed run publishes the version of its checkpoint again, and all that follow, to the
bit. `areal-q eval`, which has a model's weights alone, uses measured ranges.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_q.quant.format import Ranges


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
        if used is None or used.blocks.shape != ranges.blocks.shape:  # or another format's
            new = Ranges(ranges.blocks * self._room, ranges.whole * self._room)
        else:
            new = Ranges(
                self._kept(used.blocks, ranges.blocks), self._kept(used.whole, ranges.whole)
            )
        self._used[name] = new
        return new

    def tensors(self) -> dict[str, Tensor]:
        """Returns the ranges in use, float32, by parameter: NAME.blocks in the shape of its block scales, and
        the scalar NAME.whole."""
        return {
            f"{name}.{part}": getattr(used, part)
            for name, used in self._used.items()
            for part in ("blocks", "whole")
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on with ranges that `tensors` gave."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in tensors)
        self._used = {n: Ranges(tensors[f"{n}.blocks"], tensors[f"{n}.whole"]) for n in names}

    def _kept(self, used: Tensor, measured: Tensor) -> Tensor:
        stays = (measured <= used) & (measured * self._room**2 >= used)
        return torch.where(stays, used, measured * self._room)
