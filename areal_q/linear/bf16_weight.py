"""A published weight as bfloat16 numbers times float32 scales, for products of bfloat16.

| format | numbers | scale of | exact |
|---|---|---|---|
| bf16 | weights | nothing | yes |
| fp8 | codes | 128 × 128 weights | yes |
| fp8-channel, fp8-weight, int8-weight | codes | an output | yes |
| int4 | codes | 128 channels of an output | yes |
| int4-fp8 | codes times group scales in E4M3 | an output | yes |
| nvfp4 | codes times block scales in E4M3 | an output | yes |
| mxfp4 | codes times powers of two | nothing | yes |
| int4-g32, nf4, and any other | weights, in float32 where bfloat16 does not hold them | nothing | yes |

Exact means that numbers times scales are what `Format.dequantize` returns, up to the rounding of float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal_q.quant.activations import GROUP
from areal_q.quant.format import Format, Parts, blocked, unblocked
from areal_q.quant.formats import e2m1
from areal_q.quant.formats.fp8_block import Fp8
from areal_q.quant.formats.fp8_channel import Fp8Channel, Fp8Weight
from areal_q.quant.formats.int4 import Int4
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.int8 import Int8Weight
from areal_q.quant.formats.nibble_packing import unpack_words
from areal_q.quant.formats.nvfp4 import Nvfp4

Activations = Literal["bfloat16", "e4m3 rows", "e4m3 groups"]
"""What is done to x before a product: rounding to bfloat16, or activations.quantize_rows_e4m3 or
quantize_groups_e4m3, whose codes bfloat16 holds"""


@dataclass(frozen=True)
class Bf16Weight:
    numbers: Tensor
    """bfloat16 [out, in]; float32 if bfloat16 does not hold them"""
    scale: Tensor
    """float32 [groups, out]; one group is all channels, several are 128 channels each"""
    activations: Activations = "bfloat16"


def bf16_weight(format: Format, parts: Sequence[Parts]) -> Bf16Weight:
    """Returns the weights of `parts`, stacked over outputs."""
    each = [_of(format, p) for p in parts]
    numbers, scales = torch.cat([w.numbers for w in each]), [w.scale for w in each]
    return Bf16Weight(numbers, torch.cat(scales, 1).contiguous(), each[0].activations)


def _of(format: Format, parts: Parts) -> Bf16Weight:
    match format:
        case Fp8():
            numbers = parts["weight"].to(torch.bfloat16)
            scale = parts["weight_scale_inv"].repeat_interleave(GROUP, 0)[: len(numbers)]
            return Bf16Weight(numbers, scale.t(), "e4m3 groups")
        case Fp8Weight():  # a kind of Fp8Channel whose activations are not rounded
            numbers, scale = parts["weight"].to(torch.bfloat16), parts["weight_scale"]
            return Bf16Weight(numbers, scale.to(torch.float32).view(1, -1))
        case Fp8Channel():
            numbers = parts["weight"].to(torch.bfloat16)
            return Bf16Weight(numbers, parts["weight_scale"].view(1, -1), "e4m3 rows")
        case Int8Weight():
            numbers, scale = format.codes(parts).to(torch.bfloat16), parts["weight_scale"]
            return Bf16Weight(numbers, scale.to(torch.float32).view(1, -1))
        case Int4Fp8():
            group, row = format.factors(parts["weight_scale"])
            codes = blocked(_int4_codes(parts), format.group) * group.unsqueeze(-1)
            numbers = unblocked(codes, int(parts["weight_shape"][1])).to(torch.bfloat16)
            return Bf16Weight(numbers, row.view(1, -1), "e4m3 rows")
        case Int4(group=128):
            scale = format.effective(parts["weight_scale"])
            return Bf16Weight(_int4_codes(parts).to(torch.bfloat16), scale.t())
        case Nvfp4():
            codes = e2m1.decode(e2m1.unpack(parts["weight_packed"]))
            scaled = blocked(codes, 16) * parts["weight_scale"].to(torch.float32).unsqueeze(-1)
            numbers = unblocked(scaled, codes.shape[1]).to(torch.bfloat16)
            return _plain(numbers, parts["weight_global_scale"].reciprocal())
        case _:
            exact = format.dequantize(parts)
            numbers = exact.to(torch.bfloat16)
            return _plain(numbers if torch.equal(numbers.float(), exact) else exact)


def _plain(numbers: Tensor, scale: Tensor | None = None) -> Bf16Weight:
    scale = torch.ones(1) if scale is None else scale
    return Bf16Weight(numbers, scale.view(1, 1).repeat(1, len(numbers)))


def _int4_codes(parts: Parts) -> Tensor:
    """Returns the codes -8 … 7, float32 [out, in]."""
    codes = unpack_words(parts["weight_packed"], int(parts["weight_shape"][1]))
    return codes.to(torch.float32).sub_(8)
