"""int8: symmetric 8-bit weights, one scale per output channel; activations 8-bit per token (W8A8).

    scale[o] = max(max_i |w[o, i]| / 127, smallest normal float32)     float32 [out, 1]
    code     = round_half_even(w / scale)                               int8 [out, in], -127 … 127

Range. ±max|w| of each channel, exactly representable up to float32 rounding; -128 is never used,
so the format is symmetric and negating a weight negates its code.
Granularity. One scale for a row of W, so it can be taken out of the dot product: the GEMM runs on
whole numbers and is exact (see `linear.py`). An outlier costs precision in its own channel only.
Error bound. |w - code · scale| ≤ scale / 2, plus float32 rounding of the product (2⁻²³ · 127
scales). The floor under the scale defines rows of zeros (codes 0) and rows so small that their
scale would be subnormal, where 1/127 could no longer be represented to any precision: the bound
holds there too. Re-quantizing what `dequantize` returns gives the same codes: the largest code of
a row above the floor is ±127 by construction, and the scale moves by no more than one unit in the
last place. Against torchao's int8 dynamic-activation layout: the same symmetric per-row scheme,
but 127 rather than 127.5 levels on each side, and float32 scales whatever the model's dtype.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_q.errors import QuantizationError
from areal_q.quant.activations import INT8_MAX
from areal_q.quant.format import Parts, Ranges, as_float32, checked_float32, row_ranges, scales_for
from areal_q.quant.kernels import dispatch
from areal_q.quant.linear.quantized_linear import Int8Linear

MOST_INPUTS = (2**31 - 1) // INT8_MAX**2
"""The largest in_features whose products every engine may add up in an int32: 133,144."""


class Int8:
    name = "int8"
    suffixes = ("weight", "weight_scale")
    code_bits = 8
    shared_scale = False

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        return 8.0 + 32.0 / in_features

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight)

    def quantize(self, weight: Tensor, name: str, ranges: Ranges | None = None) -> Parts:
        w = as_float32(weight, name)
        if w.shape[1] > MOST_INPUTS:
            raise QuantizationError(
                f"{name}: sums over {w.shape[1]:,} inputs do not fit an int32, over {MOST_INPUTS:,} they do"
            )
        fast = dispatch.eight_bits(w, name, torch.int8, (1, w.shape[1]), ranges and ranges.blocks)
        if fast is not None:
            return {"weight": fast[0], "weight_scale": fast[1]}
        w = checked_float32(w, name)
        scale = scales_for((ranges or self.ranges(w)).blocks, INT8_MAX)
        codes = (w / scale).round_().clamp_(-INT8_MAX, INT8_MAX)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}

    def dequantize(self, parts: Parts) -> Tensor:
        return parts["weight"].to(torch.float32) * parts["weight_scale"]

    def error_bound(self, parts: Parts) -> Tensor:
        return parts["weight_scale"] * (0.5 + 127 * 2**-23)

    def linear(self, parts: Sequence[Parts]) -> Int8Linear:
        return Int8Linear(
            torch.cat([p["weight"] for p in parts]), torch.cat([p["weight_scale"] for p in parts])
        )
