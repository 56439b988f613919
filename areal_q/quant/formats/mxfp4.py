"""mxfp4: E2M1 weights in blocks of 32 that share a power of two (OCP Microscaling v1.0; QeRL).

    X     = floor(log2(max |w| over the block)) - 2, within -127 … 127
    scale = 2^X, stored as X + 127: E8M0                                uint8 [out, ⌈in/32⌉]
    code  = E2M1(w / 2^X), saturated                                    two in a byte [out, in/2]

The conversion of §6.3 of the specification: the largest power of two in the block falls on E2M1's, 4.
So what exceeds 6 · 2^X, up to 8 · 2^X, is clamped. (compressed-tensors rounds the maximum before its
logarithm and so moves blocks whose largest is above 7 · 2^X one exponent up; engines read both alike.)
Layout of compressed-tensors' `mxfp4-pack-quantized`: `weight_packed`, `weight_scale`. Activations stay
as they are; the GEMM runs in float32 on weights dequantized once.

Range. Every float32; no product is rounded, since scales are powers of two. Odd numbers of inputs are
refused, a last block of fewer than 32 is not. Error bound. With s = 2^X: s/4 up to 1½ s, s/2 up to 3 s,
s at 4 s, and 2 s at the top code. Blocks of zeros have E8M0's smallest scale. Codes and scales are those
of torchao's MX tensors in mode FLOOR, bit for bit down to 2⁻¹²⁴.
"""

import torch
from torch import Tensor

from areal_q.quant.format import (
    Parts,
    Ranges,
    as_float32,
    blocked,
    checked_ranges,
    row_ranges,
    unblocked,
)
from areal_q.quant.formats import e2m1
from areal_q.quant.rescaling import Fold

BLOCK = 32
TOP_POWER = 2
"""log2 of the largest power of two in E2M1."""


class Mxfp4:
    name = "mxfp4"
    suffixes = ("weight_packed", "weight_scale")
    code_bits = 4
    shared_scale = False

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight, BLOCK)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        blocks = (ranges or checked_ranges(self.ranges, w, name)).blocks
        biased = blocks.contiguous().view(torch.int32) >> 23  # the exponent's bits of a float32
        scale = (biased - TOP_POWER).clamp_(min=0).to(torch.uint8)
        packed = e2m1.quantize(w, real_scale({"weight_scale": scale}), BLOCK, name)
        return {"weight_packed": packed, "weight_scale": scale}

    def dequantize(self, parts: Parts) -> Tensor:
        values = e2m1.decode(e2m1.unpack(parts["weight_packed"]))
        scaled = blocked(values, BLOCK) * real_scale(parts).unsqueeze(-1)
        return unblocked(scaled, values.shape[1])


def real_scale(parts: Parts) -> Tensor:
    """Returns the numbers by which codes are multiplied, float32 [out, blocks]."""
    return parts["weight_scale"].view(torch.float8_e8m0fnu).to(torch.float32)
