"""int3: a format for the laboratory alone, coarse enough to hurt a small model within minutes.

Codes -3 … 3, one float32 scale per output channel, activations 8-bit per token: int8 with 7 levels, kept in
whole bytes. No engine runs it and no setting names it; `with_format` puts it where `int8` would stand.
"""

from msgspec.structs import replace
from torch import Tensor, int8

from areal_q.config import Run
from areal_q.quant.format import Parts, Ranges, checked_float32, scales_for
from areal_q.quant.formats.int8 import Int8
from areal_q.quant.registry import FORMATS
from areal_q.quant.rescaling import Fold

LEVELS = 3


class Int3(Int8):
    name = "int3"

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = checked_float32(weight, name, fold)
        scale = scales_for((ranges or self.ranges(w)).blocks, LEVELS)
        return {
            "weight": (w / scale).round_().clamp_(-LEVELS, LEVELS).to(int8),
            "weight_scale": scale,
        }


def with_format(run: Run, format: str) -> Run:
    """Returns `run` with rollouts in `format`, which may be one that settings do not know."""
    # Not when this module is imported: tests that go through all formats would meet it.
    FORMATS.setdefault("int3", Int3())
    return replace(run, rollout=replace(run.rollout, format=format))
