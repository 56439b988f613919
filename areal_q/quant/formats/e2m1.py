"""E2M1, the four-bit float of nvfp4 and mxfp4: 0, ½, 1, 1½, 2, 3, 4, 6 and a sign bit (OCP MX v1.0 §5.3).

A code is sign · 8 + index in that list: its own bits.
"""

import torch
from torch import Tensor

from areal_q.kernels.quantize import dispatch
from areal_q.quant.activations import on
from areal_q.quant.format import blocked, unblocked
from areal_q.quant.linears import check_inputs

MAX = 6.0
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_REAL = torch.cat((_VALUES, -_VALUES))


def _encode(x: Tensor) -> Tensor:
    """uint8 codes of the nearest values, ties to an even code, beyond ±6 saturated."""
    a = x.abs()
    # Between powers of two the values are evenly spaced, so rounding to whole numbers does it.
    index = torch.where(
        a < 2, (a * 2).round(), torch.where(a < 4, a.round() + 2, (a / 2).round() + 4)
    )
    return (index.clamp(max=7) + 8 * torch.signbit(x)).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """float32 values of uint8 codes."""
    return on(_REAL, codes.device)[codes.int()]


def quantize(w: Tensor, scale: Tensor, block: int, name: str) -> Tensor:
    """Packed codes uint8 [out, in / 2] of w float32 [out, in] / scale float32 [out, ⌈in / block⌉].

    Raises QuantizationError for an odd `in`.
    """
    check_inputs("mxfp4", w.shape[1], name)
    packed = dispatch.four_bits(w, scale, block, w.shape[1] // 2, kind="e2m1")
    if packed is not None:
        return packed
    codes = _encode(unblocked(blocked(w, block) / scale.unsqueeze(-1), w.shape[1]))
    return codes[:, ::2] | codes[:, 1::2] << 4  # the first in the low half


def unpack(packed: Tensor) -> Tensor:
    """Undoes `pack`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
