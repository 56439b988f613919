"""What quantizing costs, and how much of a step survives it.

QuRL, appendix A (eq. 14): the quantization error relative to the weights, as squared Frobenius norms
over all quantized parameters. Where the error is orders of magnitude larger than a step's update, most
codes do not move: `codes_moved` counts those that did.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import codes_of, dequantize_state, is_quantized


def normalized_error(
    state: Mapping[str, Tensor], published: Mapping[str, Tensor], format: str
) -> float:
    """‖Q(θ) - θ‖² / ‖θ‖², `published` being `quantize_state(state, format)`."""
    restored = dequantize_state(published, format)
    names = [name for name in state if is_quantized(name)]
    change = sum(float((restored[n].float() - state[n].float()).square().sum()) for n in names)
    return change / sum(float(state[n].float().square().sum()) for n in names)


def codes_moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor], format: str) -> float:
    """Share of the codes, 0 … 1, that differ between two published versions; 0.0 without any."""
    bits = FORMATS[format].code_bits
    new = codes_of(after, format)
    pairs = [(old, new[name]) for name, old in codes_of(before, format).items()]
    total = sum(8 * old.nbytes // bits for old, _ in pairs)
    whole = torch.uint8 if bits <= 8 else torch.int16
    moved = 0
    for pair in pairs:
        # numpy counts what is not 0 in a seventh of the time that torch takes.
        differ = np.bitwise_xor(*(x.cpu().flatten().view(whole).numpy() for x in pair))
        halves = (differ & 15, differ >> 4) if bits < 8 else (differ,)
        moved += sum(map(np.count_nonzero, halves))
    return moved / max(1, total)
