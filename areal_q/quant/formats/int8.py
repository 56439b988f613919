"""int8: symmetric 8-bit weights, one scale per output channel; activations 8-bit per token (W8A8).

    scale[o] = max(max_i |w[o, i]| / 127, smallest normal float32)     float32 [out, 1]
    code     = round_half_even(w / scale)                               int8 [out, in], -127 … 127

Range. ±max|w| of each channel, exactly representable up to float32 rounding; -128 is never used,
so the format is symmetric and negating a weight negates its code.
Granularity. One scale for a row of W, so it can be taken out of the dot product: the GEMM runs on
whole numbers and is exact (see areal_q/linear). An outlier costs precision in its own channel only.
Error bound. |w - code · scale| ≤ scale / 2, plus float32 rounding of the product (2⁻²³ · 127
scales). The floor under the scale defines rows of zeros (codes 0) and rows so small that their
scale would be subnormal, where 1/127 could no longer be represented to any precision: the bound
holds there too. Re-quantizing what `dequantize` returns gives the same codes: the largest code of
a row above the floor is ±127 by construction, and the scale moves by no more than one unit in the
last place. Against torchao's int8 dynamic-activation layout: the same symmetric per-row scheme,
but 127 rather than 127.5 levels on each side, and float32 scales whatever the model's dtype.

int8-weight: the same codes with activations as they are (W8A16). Layout of compressed-tensors'
`pack-quantized`: `weight_packed`, int32 [out, ⌈in/4⌉], code + 128 in eight bits, the first in the lowest;
`weight_scale`, bfloat16 [out, 1]; `weight_shape`, int64 [2]. The scale is rounded to bfloat16, in which
engines keep it, before codes are chosen; what it is too small for is clamped, by a quarter of a code at most.
"""

import torch
from torch import Tensor

from areal_q.quant.activations import INT8_MAX
from areal_q.quant.format import (
    EightBits,
    Parts,
    Ranges,
    as_float32,
    bf16_scaled,
    checked_ranges,
    row_ranges,
)
from areal_q.quant.rescaling import Fold


class Int8(EightBits):
    name = "int8"
    dtype = torch.int8
    largest = INT8_MAX

    def nearest(self, scaled: Tensor) -> Tensor:
        return scaled.round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


class Int8Weight:
    name = "int8-weight"
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    code_bits = 8
    shared_scale = False

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        ranges = bf16_scaled(ranges or checked_ranges(self.ranges, w, name), INT8_MAX)
        parts = _INT8.quantize(w, name, ranges)
        padded = torch.nn.functional.pad(parts["weight"], (0, -w.shape[1] % 4), value=-128)
        return {
            "weight_packed": (padded.view(torch.uint8) ^ 128).view(torch.int32),
            "weight_scale": parts["weight_scale"].to(torch.bfloat16),
            "weight_shape": torch.tensor(w.shape),  # only the host reads it
        }

    def codes(self, parts: Parts) -> Tensor:
        """int8 [out, in]."""
        stored = parts["weight_packed"].contiguous().view(torch.uint8)
        return (stored[:, : int(parts["weight_shape"][1])] ^ 128).view(torch.int8)

    def dequantize(self, parts: Parts) -> Tensor:
        return self.codes(parts).to(torch.float32).mul_(parts["weight_scale"])


_INT8 = Int8()
