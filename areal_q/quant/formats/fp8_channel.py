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

from areal_q.kernels.quantize import dispatch
from areal_q.quant.activations import E4M3_MAX, to_e4m3
from areal_q.quant.format import (
    Parts,
    Ranges,
    as_float32,
    bf16_scaled,
    checked_float32,
    checked_ranges,
    row_ranges,
    scales_for,
)
from areal_q.quant.rescaling import Fold


class Fp8Channel:
    name = "fp8-channel"
    suffixes = ("weight", "weight_scale")
    code_bits = 8
    shared_scale = False

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name)
        fast = dispatch.eight_bits(
            w, name, torch.float8_e4m3fn, (1, w.shape[1]), ranges and ranges.blocks,
            factors=fold and fold.factors(w),
        )  # fmt: skip
        if fast is not None:
            return {"weight": fast[0], "weight_scale": fast[1]}
        w = checked_float32(w, name, fold)
        scale = scales_for((ranges or self.ranges(w)).blocks, E4M3_MAX)
        return {"weight": to_e4m3(w / scale), "weight_scale": scale}

    def dequantize(self, parts: Parts) -> Tensor:
        return parts["weight"].to(torch.float32).mul_(parts["weight_scale"])


class Fp8Weight(Fp8Channel):
    name = "fp8-weight"

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        ranges = ranges or checked_ranges(self.ranges, w, name)
        parts = super().quantize(w, name, bf16_scaled(ranges, E4M3_MAX))
        return {**parts, "weight_scale": parts["weight_scale"].to(torch.bfloat16)}
