"""4-bit codes in wider integers: the layouts of compressed-tensors and of bitsandbytes."""

import torch
from torch import Tensor

_PER_WORD = 8


def pack_words(codes: Tensor) -> Tensor:
    """Codes 0 … 15 [out, in] → int32 [out, ⌈in / 8⌉], the first in the lowest bits; filled up with 0.

    Example: 1, 2, 3 becomes 0x321.
    """
    rest = -codes.shape[1] % _PER_WORD
    wide = torch.nn.functional.pad(codes.to(torch.int32), (0, rest)).unflatten(1, (-1, _PER_WORD))
    word = wide[..., 0].clone(memory_format=torch.contiguous_format)
    for i in range(1, _PER_WORD):
        word |= wide[..., i] << (4 * i)
    return word


def unpack_words(words: Tensor, width: int) -> Tensor:
    """Undoes `pack_words`: int32 [out, ⌈width / 8⌉] → uint8 [out, width]."""
    shifts = torch.arange(0, 4 * _PER_WORD, 4, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.to(torch.uint8).flatten(1)[:, :width]
