"""int4: symmetric 4-bit weights in groups of 128 along a row, activations as they are (W4A16). int4-g32: in
groups of 32, which are nearer to the weights, take 4.5 bits a weight, and divide more widths.

    scale[o, g] = bfloat16(max(max |w| over the group / 7.5, smallest normal))  [out, ⌈in/group⌉]
    code        = round_half_even(w / scale), clamped to -8 … 7

Layout of compressed-tensors' `pack-quantized`, which vLLM runs by Marlin or Machete: `weight_packed`,
int32 [out, ⌈in/8⌉], code + 8 in four bits, the first in the lowest; `weight_scale`; `weight_shape`,
int64 [2], since a row may end within a word. The last group of a row may be smaller (vLLM wants whole
ones). Scales are rounded to bfloat16, the dtype in which the engine keeps them, before codes are
chosen, so that both sides mean the same numbers. The GEMM runs in float32 on weights dequantized once.

Range. 16 levels over ±max|w|: 7.5 steps to each side, of which the outermost half step rounds onto
7 or -8. Error bound. |w - code · scale| ≤ 0.53 scale: half a step, and at the positive end
7.5 (1 + 2⁻⁸) - 7, as bfloat16 may round the scale down. The floor under the scale defines groups of
zeros. Codes and scales are those of compressed-tensors' min-max observer, bit for bit, where it is
given float32. Two things int8 has and this has not: -w has other codes than w, and re-quantizing what
`dequantize` returns may move the scale.
"""

import torch
from torch import Tensor

from areal_q.kernels.quantize import dispatch
from areal_q.quant.format import (
    Parts,
    Ranges,
    as_float32,
    blocked,
    checked_ranges,
    row_ranges,
    scales_for,
    unblocked,
)
from areal_q.quant.formats.nibble_packing import pack_words, unpack_words
from areal_q.quant.rescaling import Fold


class Int4:
    name = "int4"
    group = 128
    """Weights of a row that share a scale"""
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    code_bits = 4
    shared_scale = False

    def ranges(self, weight: Tensor) -> Ranges:
        return row_ranges(weight, self.group)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        blocks = (ranges or checked_ranges(self.ranges, w, name)).blocks
        scale = self.scales(blocks if fold is None or fold.clip is None else blocks * fold.clip)
        effective = self.effective(scale)
        divisor = torch.where(effective > 0, effective, torch.inf)
        words = -(-w.shape[1] // 8)
        packed = dispatch.four_bits(w, divisor, self.group, 4 * words, kind="int4")
        if packed is None:
            codes = unblocked(blocked(w, self.group) / divisor.unsqueeze(-1), w.shape[1])
            packed = pack_words(codes.round_().clamp_(-8, 7) + 8)
        return {
            "weight_packed": packed.view(torch.int32),
            "weight_scale": scale,
            "weight_shape": torch.tensor(w.shape),  # only the host reads it
        }

    def dequantize(self, parts: Parts) -> Tensor:
        width = int(parts["weight_shape"][1])
        codes = unpack_words(parts["weight_packed"], width).to(torch.float32).sub_(8)
        scale = self.effective(parts["weight_scale"]).unsqueeze(-1)
        return unblocked(blocked(codes, self.group) * scale, width)

    def scales(self, ranges: Tensor) -> Tensor:
        """bfloat16 [out, ⌈in/group⌉]."""
        return scales_for(ranges, 7.5).to(torch.bfloat16)

    def effective(self, scale: Tensor) -> Tensor:
        """float32: by what the engine's kernel multiplies codes, given the published scale."""
        return scale.to(torch.float32)


class Int4G32(Int4):
    name = "int4-g32"
    group = 32
