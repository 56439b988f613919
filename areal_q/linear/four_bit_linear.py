"""Linear layers on a CPU whose weights have four bits and whose activations are int8, for `dtype = "int8"`.

A weight is whole numbers times scales:

| format | numbers | a scale for |
|---|---|---|
| int4, int4-g32 | -8 … 7 | 128, or 32, channels of an output |
| nvfp4 | twice those of E2M1: 0, ±1, ±2, ±3, ±4, ±6, ±8, ±12 | 16, half of the published one |
| mxfp4 | the same | 32, half of the published one |

Codes stay as they were published. Numbers times scales are what `Format.dequantize` returns, up to the rounding
of float32. Activations are those of an Int8Linear: a code per channel, a scale per row. The formats themselves
leave them at 16 bits, so that this is an approximation; docs/engines.md has what it costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.kernels import cpu_activations, cpu_four_bits
from areal_q.kernels.cpu_tile import PANEL
from areal_q.linear.cpu_linear import cpu_linear, over_panels
from areal_q.linear.quantized_linear import Linear
from areal_q.linear.registry import linear_of
from areal_q.quant.activations import quantize_rows
from areal_q.quant.format import Format, Parts
from areal_q.quant.formats import e2m1, mxfp4, nvfp4
from areal_q.quant.formats.int4 import Int4
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.mxfp4 import Mxfp4
from areal_q.quant.formats.nvfp4 import Nvfp4

_INT4 = torch.arange(-8, 8, dtype=torch.int8)
_E2M1 = (2 * e2m1.decode(torch.arange(16))).to(torch.int8)


@dataclass(frozen=True)
class FourBitWeight:
    words: Tensor
    """int32 [out, ⌈in / 8⌉]: eight codes each, the first in the lowest bits"""
    numbers: Tensor
    """int8 [16]: what the codes stand for"""
    scale: Tensor
    """float32 [out, ⌈in / block⌉]"""
    block: int
    """Channels that share a scale"""


def four_bit_linear(format: Format, parts: Sequence[Parts]) -> Linear | None:
    """Returns the layer on the weights of `parts`, stacked over outputs, or None if they are no
    `four_bit_weight`."""
    weight = four_bit_weight(format, parts)
    if weight is None:
        return None
    if cpu_four_bits.has_four_bits():
        return FourBitLinear(weight)
    return Int8RowsLinear(cpu_linear(linear_of(format, parts)))


class FourBitLinear:
    """A layer that multiplies the codes themselves. Sums over a block of the weight are exact."""

    def __init__(self, weight: FourBitWeight) -> None:
        self.block = weight.block
        self.words = cpu_four_bits.pack_codes(weight.words, weight.block // 8).numpy()
        self.offset = -int(weight.numbers.min())
        self.table = (weight.numbers + self.offset).to(torch.uint8).numpy()
        scale = F.pad(weight.scale, (0, 0, 0, -len(weight.scale) % PANEL))
        self.scale = scale.view(len(self.words), PANEL, -1).transpose(1, 2).contiguous().numpy()
        self.nothing = np.zeros((1, len(weight.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        rows, outs, blocks = len(x), self.nothing.shape[1], self.scale.shape[1]
        codes = np.zeros((rows, blocks * self.block), np.uint8)
        x_scale, y = np.empty(rows, np.float32), np.empty((rows, outs), np.float32)
        cpu_activations.int8_rows(x.numpy(), 0, codes, x_scale)
        begins = np.empty((rows, blocks), np.int32)
        cpu_four_bits.block_sums(codes.view(np.int8), -self.offset, begins)
        added = self.nothing if add is None else add.view(-1, outs).numpy()
        weight = self.words, self.table, self.scale
        words = codes.view(np.int32)
        over_panels(cpu_four_bits.gemm, words, *weight, begins, x_scale, added, y)
        return torch.from_numpy(y)


class Int8RowsLinear:
    """`linear` on activations that are rounded to int8 codes and back: what FourBitLinear computes, for
    processors that lack its instructions."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, scale = quantize_rows(x)
        return self.linear(codes * scale, add)


def four_bit_weight(format: Format, parts: Sequence[Parts]) -> FourBitWeight | None:
    """Returns the weights of `parts`, stacked over outputs; None if `format` has no weights of four bits, or
    prescribes other activations than int8 (int4-fp8), or if its codes stand for no whole numbers (nf4)."""
    match format:
        case Int4Fp8():  # a kind of Int4 whose activations are FP8
            return None
        case Int4():
            scales = [format.effective(p["weight_scale"]) for p in parts]
            return _stacked(parts, _INT4, scales, format.group)
        case Nvfp4():
            scales = [nvfp4.real_scale(p) / 2 for p in parts]
            return _stacked(parts, _E2M1, scales, nvfp4.BLOCK)
        case Mxfp4():
            scales = [mxfp4.real_scale(p) / 2 for p in parts]
            return _stacked(parts, _E2M1, scales, mxfp4.BLOCK)
        case _:
            return None


def _stacked(
    parts: Sequence[Parts], numbers: Tensor, scales: list[Tensor], block: int
) -> FourBitWeight:
    words = torch.cat([_words(p["weight_packed"]) for p in parts])
    return FourBitWeight(words, numbers, torch.cat(scales), block)


def _words(packed: Tensor) -> Tensor:
    """Returns packed codes, int32 or uint8 [out, ...], as int32."""
    rest = -packed.shape[1] * packed.element_size() % 4
    return (F.pad(packed, (0, rest)) if rest else packed).contiguous().view(torch.int32)
