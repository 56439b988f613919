"""nvfp4: E2M1 weights in blocks of 16, scaled by E4M3 and by one float32 for the tensor (QeRL).

    global   = 448 · 6 / max |w| over the tensor                            float32 [1]
    scale    = E4M3(global · max |w| over the block / 6), 0 becomes 2⁻³     float8_e4m3fn [out, ⌈in/16⌉]
    code     = E2M1(w / (scale / global))                                   two in a byte [out, in/2]

A block's scale uses E4M3's whole range, and `global`, by which it is divided, moves it to where the
weights are. Layout of compressed-tensors' `nvfp4-pack-quantized`: `weight_packed`, `weight_scale`,
`weight_global_scale`. vLLM keeps one `global` for a fused linear, so q, k, v and gate, up of a layer
share it here (`shared_scale`): the maximum is then over all of them. Activations stay as they are; the
GEMM runs in float32 on weights dequantized once.

Range. ±max|w| of the tensor; blocks below 2⁻²⁰ of it lose their scale's precision, and then become zero.
Odd numbers of inputs are refused, a last block of fewer than 16 is not. Error bound. With s = scale /
global: s/4 up to 1½ s, s/2 up to 3 s, and s beyond, where a scale that E4M3 rounded down by up to 1/17
costs less than that; for subnormal scales the top code is off by up to 6 · 2⁻¹⁰/global more. Where max|w|
is so small that `global` would be infinite it is 1, and all codes are 0. Codes and scales are those of
compressed-tensors, bit for bit, where it is given float32.
"""

import torch
from torch import Tensor

from areal_q.quant.activations import E4M3_MAX, to_e4m3
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

BLOCK = 16
_WHERE_ZERO = 0x20
"""E4M3's code of 2⁻³"""


class Nvfp4:
    name = "nvfp4"
    suffixes = ("weight_packed", "weight_scale", "weight_global_scale")
    code_bits = 4
    shared_scale = True

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight, BLOCK)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        ranges = ranges or checked_ranges(self.ranges, w, name)
        divisor = torch.nan_to_num(E4M3_MAX * e2m1.MAX / ranges.whole, posinf=1.0).reshape(1)
        scale = to_e4m3(ranges.blocks / torch.full((), e2m1.MAX, device=w.device) * divisor)
        codes = scale.view(torch.uint8)
        codes |= (codes == 0).view(torch.uint8) * _WHERE_ZERO
        return {
            "weight_packed": e2m1.quantize(w, _numbers(codes) / divisor, BLOCK, name),
            "weight_scale": scale,
            "weight_global_scale": divisor,
        }

    def dequantize(self, parts: Parts) -> Tensor:
        values = e2m1.decode(e2m1.unpack(parts["weight_packed"]))
        return unblocked(blocked(values, BLOCK) * real_scale(parts).unsqueeze(-1), values.shape[1])


def _numbers(codes: Tensor) -> Tensor:
    """Returns the float32 numbers of E4M3 codes, uint8 [out, blocks]. On a CPU torch's cast takes three times
    as long as a look into a table."""
    if not codes.is_cpu:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def real_scale(parts: Parts) -> Tensor:
    """Returns the numbers by which codes are multiplied, float32 [out, blocks]."""
    return parts["weight_scale"].to(torch.float32) / parts["weight_global_scale"]
