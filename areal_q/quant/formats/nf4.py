"""nf4: weights as one of 16 quantiles of the normal distribution, in blocks of 64 (QLoRA, arXiv 2305.14314).

    scale = max(max |w| over the block, smallest normal)           float32 [⌈out · in / 64⌉]
    code  = index of the nearest value in _TABLE to w · (1 / scale)  two in a byte [⌈out · in / 2⌉, 1]

Blocks run through the rows of the weight as they lie in memory, from one row into the next where `in`
is no multiple of 64. Layout of bitsandbytes' 4-bit checkpoints without double quantization: `weight`,
the first code of a byte in its high half; `weight.absmax`; `weight.quant_map`, the table;
`weight.quant_state.bitsandbytes__nf4`, JSON with the shape. Activations stay as they are; the GEMM runs
in float32 on weights dequantized once.

Range. ±max|w| of each block, -1, 0 and 1 being in the table. Error bound. Half the distance to the
further neighbour, 0.152 scale at most (between -1 and -0.696). Codes and scales are those of
bitsandbytes, bit for bit, in whole blocks that are not zero.
"""

import json
import math

import torch
from torch import Tensor

from areal_q.kernels.quantize import dispatch
from areal_q.quant.activations import SMALLEST_SCALE, on
from areal_q.quant.format import (
    Parts,
    Ranges,
    as_float32,
    checked_ranges,
    row_ranges,
)
from areal_q.quant.rescaling import Fold

_BLOCK = 64
_TABLE = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0]
)  # fmt: skip
BORDERS = (_TABLE[1:] + _TABLE[:-1]) / 2
_STATE = "weight.quant_state.bitsandbytes__nf4"


class Nf4:
    name = "nf4"
    suffixes = ("weight", "weight.absmax", "weight.quant_map", _STATE)
    code_bits = 4
    shared_scale = False

    def ranges(self, weight: Tensor) -> Ranges:
        rows = row_ranges(_blocks(weight.detach().to(torch.float32)), _BLOCK)
        return Ranges(rows.blocks.flatten(), rows.whole)

    def quantize(
        self, weight: Tensor, name: str, ranges: Ranges | None = None, fold: Fold | None = None
    ) -> Parts:
        w = as_float32(weight, name, fold)
        blocks = (ranges or checked_ranges(self.ranges, w, name)).blocks
        scale, x = blocks.clamp(min=SMALLEST_SCALE), _blocks(w)
        of_rows = scale.view(len(x), -1)
        borders = on(BORDERS, w.device)
        packed = dispatch.four_bits(
            x, of_rows, _BLOCK, x.shape[1] // 2, kind="nf4", borders=borders
        )
        if packed is None:
            scaled = x * (1.0 / of_rows).repeat_interleave(_BLOCK, 1)
            codes = torch.bucketize(scaled, borders, out_int32=True).to(torch.uint8)
            packed = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = packed.view(-1, 1)[: -(-w.numel() // 2)]
        table = {"quant_type": "nf4", "blocksize": _BLOCK, "dtype": "bfloat16", "shape": [*w.shape]}
        # Only the host reads it.
        state = torch.tensor(list(json.dumps(table).encode()), dtype=torch.uint8)
        return dict(
            zip(self.suffixes, (packed, scale, on(_TABLE, w.device).clone(), state), strict=True)
        )

    def dequantize(self, parts: Parts) -> Tensor:
        shape = json.loads(bytes(parts[_STATE].tolist()))["shape"]
        codes = torch.cat((parts["weight"] >> 4, parts["weight"] & 15), 1).flatten()
        values = parts["weight.quant_map"][codes[: math.prod(shape)].int()]
        per_weight = parts["weight.absmax"].repeat_interleave(_BLOCK)[: math.prod(shape)]
        return (values * per_weight).view(shape)


def _blocks(w: Tensor) -> Tensor:
    """w [out, in] where its rows are whole blocks; else [⌈n / 64⌉, 64], filled up with zeros."""
    if w.shape[1] % _BLOCK == 0:
        return w
    flat = w.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
