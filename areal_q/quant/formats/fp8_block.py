"""fp8: E4M3 weights in blocks of 128×128, activations in groups of 1×128 (W8A8; FP8-RL, Jet-RL).

    scale[i, j] = max(max |w| over the block / 448, smallest normal)  float32 [⌈out/128⌉, ⌈in/128⌉]
    code        = E4M3(w / scale), round to nearest even               float8_e4m3fn [out, in]

E4M3 (Micikevicius et al., arXiv 2209.05433): 1 sign, 4 exponent and 3 mantissa bits, bias 7, no
infinity; largest 448, smallest normal 2⁻⁶, smallest 2⁻⁹. Layout of DeepSeek-V3's checkpoints and of
`quant_method = "fp8"` with `weight_block_size = [128, 128]`: the scale, by which a code is
multiplied, is called `weight_scale_inv`. Blocks at the edge of a weight are smaller. vLLM fuses q, k
and v, and gate and up, only where their rows are multiples of 128.

Range. ±max|w| of each block. Error bound. Three mantissa bits: |w - code · scale| ≤ 2⁻⁴ |code| ·
scale, and half the distance of the subnormals, 2⁻¹⁰ scale, where that is more; a block's small
weights keep their relative precision, which int8's do not. Against torchao's
blockwise FP8: the same codes and scales.
"""

import torch
from torch import Tensor

from areal_q.quant.activations import GROUP, expanded
from areal_q.quant.format import EightBits, Ranges, row_ranges


class Fp8(EightBits):
    name = "fp8"
    suffixes = ("weight", "weight_scale_inv")
    block = GROUP

    def ranges(self, weight: Tensor) -> Ranges:
        rows = row_ranges(weight, GROUP)
        blocks = torch.stack([x.amax(0) for x in rows.blocks.split(GROUP)])
        return Ranges(blocks, rows.whole)

    def spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        return expanded(scale, shape)
