"""The layer that runs on a published weight, for each number format.

A format without a line in LINEARS leaves activations as they are: its weights are dequantized once, when
loaded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from areal_q.linear.fp8_gemm import Fp8KernelLinear, Operand, emulated, fp8_gemm
from areal_q.linear.quantized_linear import (
    FloatLinear,
    Fp8GroupLinear,
    Fp8RowLinear,
    Int8Linear,
    Stacked,
)
from areal_q.quant.format import Format, Parts
from areal_q.quant.formats.fp8_block import Fp8
from areal_q.quant.formats.fp8_channel import Fp8Channel
from areal_q.quant.formats.int4_fp8 import Int4Fp8
from areal_q.quant.formats.int8 import Int8


def linear_of(format: Format, parts: Sequence[Parts]) -> Stacked:
    """Returns x ↦ x · Wᵀ as the engine runs it; W: the weights of `parts`, stacked over outputs."""
    if made := LINEARS.get(type(format)):
        return made(format, parts)
    return FloatLinear(torch.cat([format.dequantize(p) for p in parts]))


def _int8(_: Int8, parts: Sequence[Parts]) -> Stacked:
    codes, scales = [p["weight"] for p in parts], [p["weight_scale"] for p in parts]
    return Int8Linear(torch.cat(codes), torch.cat(scales))


def _fp8_blocks(format: Fp8, parts: Sequence[Parts]) -> Stacked:
    gemm = fp8_gemm(parts[0]["weight"].device)
    if gemm is emulated:
        return Fp8GroupLinear(torch.cat([format.dequantize(p) for p in parts]))
    weights = [Operand(p["weight"], p["weight_scale_inv"], blocks=True) for p in parts]
    return Fp8KernelLinear(Operand.stacked(weights), gemm)


def _fp8_rows(_: Fp8Channel, parts: Sequence[Parts]) -> Stacked:
    codes = torch.cat([p["weight"] for p in parts]).to(torch.float32)
    return Fp8RowLinear(codes, torch.cat([p["weight_scale"] for p in parts]))


def _int4_fp8(format: Int4Fp8, parts: Sequence[Parts]) -> Stacked:
    weight = torch.cat([format.dequantize(p) for p in parts])
    return Fp8RowLinear(weight, torch.ones(len(weight), device=weight.device))


LINEARS: dict[type[Format], Callable[[Any, Sequence[Parts]], Stacked]] = {
    Int8: _int8,
    Fp8: _fp8_blocks,
    Fp8Channel: _fp8_rows,
    Int4Fp8: _int4_fp8,
}
"""Formats that quantize activations as well"""
