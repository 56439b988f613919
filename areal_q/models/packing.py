"""Where each token of a packed batch stands: computed once a batch, used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FILL = 0.75
"""A sequence shorter than this share of its bucket's longest one opens the next bucket"""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """int64 [sequences, longest] into the packed tokens; padding repeats the last token"""


@dataclass(frozen=True)
class PackedLayout:
    """S sequences of T tokens in all, one after the other.

    Example: lengths (4, 3): positions [0, 1, 2, 3, 0, 1, 2], cu_seqlens [0, 4, 7]; one bucket with
    rows [[0, 1, 2, 3], [4, 5, 6, 6]]; unpad [0, 1, 2, 3, 4, 5, 6].
    """

    lengths: tuple[int, ...]
    positions: Tensor
    """int64 [T] place of each token in its sequence"""
    cu_seqlens: Tensor
    """int32 [S + 1] where each sequence starts, and T"""
    buckets: tuple[Bucket, ...]
    unpad: Tensor
    """int64 [T]: where each packed token stands in the concatenation of all buckets"""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedLayout":
        """The layout of sequences of these lengths. Raises ValueError unless all are at least 1."""
        if not lengths or min(lengths) < 1:
            raise ValueError("a packed batch needs sequences of at least one token")
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0)
        starts = ends - sizes
        total = int(ends[-1])
        positions = torch.arange(total) - starts.repeat_interleave(sizes)
        unpad = torch.empty(total, dtype=torch.int64)
        buckets, offset = [], 0
        for members, longest in _similar(sizes):
            columns = torch.arange(longest)
            rows = starts[members, None] + columns.minimum(sizes[members, None] - 1)
            real = columns < sizes[members, None]
            unpad[rows[real]] = offset + real.flatten().nonzero().squeeze(-1)
            offset += rows.numel()
            buckets.append(Bucket(rows.to(device)))
        return cls(
            lengths=tuple(lengths),
            positions=positions.to(device),
            cu_seqlens=torch.cat((starts, ends[-1:])).to(device, torch.int32),
            buckets=tuple(buckets),
            unpad=unpad.to(device),
        )


def _similar(sizes: Tensor) -> Iterator[tuple[Tensor, int]]:
    """(indices of the sequences, longest length) of each bucket, the longest bucket first."""
    order = sizes.argsort(descending=True, stable=True)
    while order.numel():
        longest = int(sizes[order[0]])
        count = int((sizes[order] >= FILL * longest).sum())
        # Within a bucket in packed order, which keeps the gathers nearly sequential.
        yield order[:count].sort().values, longest
        order = order[count:]
