"""fp8-channel: E4M3 weights with a scale per output channel, activations per token (W8A8; QuRL).

    scale[o] = max(max_i |w[o, i]| / 448, smallest normal float32)     float32 [out, 1]
    code     = E4M3(w / scale), round to nearest even                   float8_e4m3fn [out, in]

E4M3 and its error as in `fp8_block.py`. With a scale per row on both sides the scales leave the sum: the
GEMM runs on the codes, and is scaled afterwards. Layout of compressed-tensors' `float-quantized` with
strategy `channel` and dynamic per-token activations.

Range. ±max|w| of each channel. Error bound. As in `fp8_block.py`, with the
channel's scale. An outlier costs its channel precision only where codes become subnormal, 2¹⁵ times
below it.

fp8-weight: the same without a rounding of activations (W8A16), the layout without `input_activations`. The
scale is rounded to bfloat16, as which it is published and in which engines keep it, before codes are chosen.
"""

import torch
from torch import Tensor

from areal_q.quant.activations import E4M3_MAX
from areal_q.quant.format import (
    EightBits,
    Parts,
    Ranges,
    as_float32,
    bf16_scaled,
    checked_ranges,
)
from areal_q.quant.rescaling import Fold


class Fp8Channel(EightBits):
    name = "fp8-channel"


class Fp8Weight(Fp8Channel):
    name = "fp8-weight"

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        ranges = ranges or checked_ranges(self.ranges, w, name)
        parts = super().quantize(w, name, bf16_scaled(ranges, E4M3_MAX))
        return {**parts, "weight_scale": parts["weight_scale"].to(torch.bfloat16)}
