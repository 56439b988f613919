"""How far a dequantized weight may be from the one that was quantized, as the headers of areal_q/quant/formats
derive it."""

import json
import math

import torch
from torch import Tensor

from areal_q.quant import FORMATS
from areal_q.quant.activations import expanded, on
from areal_q.quant.format import Parts, blocked, unblocked
from areal_q.quant.formats import e2m1, mxfp4, nvfp4
from areal_q.quant.formats.bf16 import Bf16
from areal_q.quant.formats.fp8_block import Fp8
from areal_q.quant.formats.fp8_channel import Fp8Channel
from areal_q.quant.formats.int4 import Int4
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.int8 import Int8, Int8Weight
from areal_q.quant.formats.mxfp4 import Mxfp4
from areal_q.quant.formats.nf4 import Nf4
from areal_q.quant.formats.nvfp4 import Nvfp4

_E2M1 = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0]).repeat(2)
"""Largest distance to what rounds to a code of E2M1 without saturating."""


def error_bound(name: str, parts: Parts) -> Tensor:
    """Returns the largest |weight - dequantize(parts)| within the ranges, float32, broadcastable to [out,
    in]."""
    match FORMATS[name]:
        case Bf16() as format:
            # From the rounded number r, which may be the smaller: 2⁻⁸ |w| ≤ 2⁻⁸ |r| / (1 - 2⁻⁸).
            return format.dequantize(parts).abs() * (2**-8 / (1 - 2**-8)) + 2**-134
        case Int8() | Int8Weight():
            return parts["weight_scale"].to(torch.float32) * (0.5 + 127 * 2**-23)
        case Fp8():
            scale = expanded(parts["weight_scale_inv"], parts["weight"].shape)
            return _of_e4m3(parts["weight"], scale)
        case Fp8Channel():
            return _of_e4m3(parts["weight"], parts["weight_scale"].to(torch.float32))
        case Int4Fp8() as format:
            published, scale = (
                parts["weight_scale"].float(),
                format.effective(parts["weight_scale"]),
            )
            largest = 7 * (1 + 2**-8) * published
            bound = torch.maximum(0.5 * (1 + 2**-18) * scale, largest - 7 * scale)
            return bound.repeat_interleave(format.group, 1)[:, : int(parts["weight_shape"][1])]
        case Int4() as format:
            scale = format.effective(parts["weight_scale"]).repeat_interleave(format.group, 1)
            return scale[:, : int(parts["weight_shape"][1])] * 0.53
        case Nvfp4():
            codes = e2m1.unpack(parts["weight_packed"])
            errors = on(_E2M1, codes.device)[codes.int()]
            rounding = blocked(errors, nvfp4.BLOCK) * nvfp4.real_scale(parts).unsqueeze(-1)
            exact = unblocked(rounding, codes.shape[1]) * (1 + 2**-18)
            return exact + 6 * 2**-10 / parts["weight_global_scale"]
        case Mxfp4():
            codes = e2m1.unpack(parts["weight_packed"])
            errors = torch.where(codes & 7 == 7, 2.0, on(_E2M1, codes.device)[codes.int()])
            scale = mxfp4.real_scale(parts).unsqueeze(-1)
            return unblocked(blocked(errors, mxfp4.BLOCK) * scale, codes.shape[1])
        case Nf4():
            shape = json.loads(bytes(parts["weight.quant_state.bitsandbytes__nf4"].tolist()))[
                "shape"
            ]
            each = parts["weight.absmax"].repeat_interleave(64)[: math.prod(shape)]
            return 0.152 * each.view(shape)
    raise AssertionError(name)


def _of_e4m3(codes: Tensor, scale: Tensor) -> Tensor:
    """Largest error of E4M3 codes times scale; the float32 division and product add 2⁻²² at most."""
    magnitude = codes.to(torch.float32).abs()
    return scale * (magnitude * (2**-4 + 2**-22)).clamp_(min=2**-10 * (1 + 2**-18))
