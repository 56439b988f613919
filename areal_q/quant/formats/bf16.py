"""bf16: the baseline, weights rounded to bfloat16 and nothing else.

Range. 8 exponent bits as in float32, so all that `checked_float32` takes. Granularity: none, each
number carries its own exponent. Error bound. 8 significant bits, rounded to nearest even: half a unit
in the last place, at most 2⁻⁸ · |w| for normal numbers and 2⁻¹³⁴ (half the smallest subnormal) below
them. The GEMM runs in float32 on the rounded weights: on a CPU that is faster than bfloat16 and leaves
the rounding of the weights as the only difference from the learner.
"""

import torch
from torch import Tensor

from areal_q.quant.format import Parts, Ranges, checked_float32
from areal_q.quant.rescaling import Fold


class Bf16:
    name = "bf16"
    suffixes = ("weight",)
    code_bits = 16
    shared_scale = False

    def ranges(self, weight: Tensor) -> None:
        return None

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        return {"weight": checked_float32(weight, name, fold).to(torch.bfloat16)}

    def dequantize(self, parts: Parts) -> Tensor:
        return parts["weight"].to(torch.float32)
