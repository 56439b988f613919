"""int4-fp8: the weights of int4 with activations in E4M3 per token (W4A8).

    s[o, g]  = bfloat16(max(max |w| over the group / 7, smallest normal))    published
    scale    = what the engine's kernel makes of s, below                    float32
    code     = round_half_even(w / scale), clamped to -8 … 7

Layout as in `int4.py`. The W4A8 kernel (CUTLASS, Hopper) multiplies codes by group scales in E4M3 and
whole rows by a float32 scale; vLLM derives both from the published ones when it loads them:

    row[o] = max(max_g s / 448, 1 / (448 · 512)),  e = E4M3(s · (1 / row)),  scale = E4M3(e / 8) · (8 · row)

Codes are chosen for that `scale`, so that the published tensors mean to the engine what they mean here.
It may be 1/16 below s, hence 7 and not 7.5 steps to each side: nothing is clamped. Groups whose s is
less than 2⁻¹⁶ of the largest in their row get scale 0, and are zeros.

Range. ±max|w| of each group. Error bound. Half a scale, or half a code of clamping at most; for groups
next to zero all of 7 s.
"""

import torch
from torch import Tensor

from areal_q.quant.activations import E4M3_MAX, SMALLEST_ROW_SCALE, to_e4m3
from areal_q.quant.format import scales_for
from areal_q.quant.formats.int4 import Int4


class Int4Fp8(Int4):
    name = "int4-fp8"

    def scales(self, ranges: Tensor) -> Tensor:
        return scales_for(ranges, 7).to(torch.bfloat16)

    def effective(self, scale: Tensor) -> Tensor:
        eighth, row = self.factors(scale)
        return eighth * row

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns E4M3(e / 8) [out, ⌈in/128⌉] and 8 · row [out, 1], float32."""
        s = scale.to(torch.float32)
        largest = torch.full((), E4M3_MAX, device=s.device)
        row = s.amax(1, keepdim=True).div_(largest).clamp_(min=SMALLEST_ROW_SCALE)
        eighth = to_e4m3(to_e4m3(s * row.reciprocal()).to(torch.float32) / 8)
        return eighth.to(torch.float32), row * 8
