"""Linear layers on a CPU whose weights have eight bits and whose activations are float32.

Decoding few sequences takes as long as reading the weights, which are four times as many bytes in float32
as in codes. So the product of few rows reads the codes (cpu_gemm.few_rows), and that of many rows the
numbers that were made of them when the weights were loaded.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.kernels import cpu_gemm
from areal_q.kernels.cpu_tile import PANEL
from areal_q.linear.cpu_linear import over_panels
from areal_q.linear.quantized_linear import Linear
from areal_q.quant.format import Format, Parts
from areal_q.quant.formats.fp8_channel import Fp8Weight
from areal_q.quant.formats.int8 import Int8Weight

FEW = 8
"""Rows up to which reading codes is faster"""


class EightBitLinear:
    """codes int8 or float8_e4m3fn [out, in], scale [out, 1]; `many`: the same layer, for over FEW rows."""

    def __init__(self, codes: Tensor, scale: Tensor, many: Linear) -> None:
        if codes.dtype == torch.float8_e4m3fn:
            codes = codes.view(torch.uint8)
        padded = F.pad(codes, (0, 0, 0, -len(codes) % PANEL))
        self.codes = padded.view(-1, PANEL, codes.shape[1]).contiguous().numpy()
        self.scale = scale.to(torch.float32).flatten().contiguous().numpy()
        self.nothing, self.many = np.zeros((1, len(scale)), np.float32), many

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if len(x) > FEW:
            return self.many(x, add)
        y = np.empty((len(x), len(self.scale)), np.float32)
        added = self.nothing if add is None else add.view(-1, y.shape[1]).numpy()
        over_panels(cpu_gemm.few_rows, x.numpy(), self.codes, self.scale, added, y)
        return torch.from_numpy(y)


def eight_bit_linear(format: Format, parts: Sequence[Parts], many: Linear) -> Linear:
    """Returns the layer on the weights of `parts`, stacked over outputs, of which `many` is another form; or
    `many` itself, unless `format` is one of eight bits that leaves activations as they are."""
    match format:
        case Int8Weight():
            codes = [format.codes(p) for p in parts]
        case Fp8Weight():
            codes = [p["weight"] for p in parts]
        case _:
            return many
    return EightBitLinear(torch.cat(codes), torch.cat([p["weight_scale"] for p in parts]), many)
