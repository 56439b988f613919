"""How much of a step survives quantizing. Where the error of a format is orders of magnitude larger than a
step's update (QuRL, appendix A), most codes do not move: `codes_moved` counts those that did.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import codes_of


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
