"""The position of each token in a packed batch, computed once for a batch and used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

FILL = 0.75
"""Share of the longest sequence in its bucket below which a sequence goes into the next bucket"""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """Indices into the packed tokens, int64 [sequences, longest]; padding repeats the last token"""


@dataclass(frozen=True)
class PackedLayout:
    """The layout of T tokens of S sequences, one after the other; sequences of a group share their prompt's
    tokens.

    A shared prompt is computed only once. A token attends to no token after it, so that its hidden state is the
    same in every sequence that begins with the prompt.

    Example: one group with prompt a b and the responses c and d e is packed as a b c d e, with positions
    [0, 1, 2, 2, 3]. Its sequences are a b c and a b d e, in one bucket with rows [[0, 1, 2, 2], [0, 1, 3, 4]].
    """

    lengths: tuple[int, ...]
    """Number of tokens in each sequence, its prompt included"""
    positions: Tensor
    """Position of each token in its sequence, int64 [T]"""
    buckets: tuple[Bucket, ...]
    unpad: Tensor
    """Index of each packed token in the concatenation of all buckets, int64 [T]"""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def spans(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each bucket: `rows`, and of each sequence the first column that is its own, and the one after the
        last. A prompt belongs to the first sequence of its group. int64, on the CPU."""
        spans, offset, unpad = [], 0, self.unpad.cpu()
        for bucket in self.buckets:
            rows = bucket.rows.cpu()
            places = torch.arange(offset, offset + rows.numel()).view(rows.shape)
            own = unpad[rows] == places
            begins = own.int().argmax(1)
            spans.append((rows.numpy(), begins.numpy(), (begins + own.sum(1)).numpy()))
            offset += rows.numel()
        return spans

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedLayout":
        """Returns the layout of sequences that share no tokens. Raises ValueError if one is empty."""
        return cls.of_groups([(length, (0,)) for length in lengths], device)

    @classmethod
    def of_groups(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu"
    ) -> "PackedLayout":
        """Returns the layout of groups (prompt length, response lengths), each packed as prompt, response,
        response, …

        Raises ValueError if a prompt is empty or a group has no responses. A response may be empty.
        """
        if not groups or min(prompt for prompt, _ in groups) < 1 or not all(r for _, r in groups):
            raise ValueError("a packed batch needs prompts of at least one token, with responses")
        sizes = torch.tensor([len(responses) for _, responses in groups])
        prompts = torch.tensor([prompt for prompt, _ in groups])
        responses = torch.tensor([length for _, lengths in groups for length in lengths])
        group_of = torch.arange(len(groups)).repeat_interleave(sizes)
        first = torch.ones(len(responses), dtype=torch.bool)
        first[1:] = group_of[1:] != group_of[:-1]
        prompt_of = prompts[group_of]
        # The end of each response in the packed order gives where it and the prompt of its group begin.
        ends = (responses + torch.where(first, prompt_of, 0)).cumsum(0)
        own = ends - responses
        shared = (own - prompt_of)[first][group_of]
        lengths, total = prompt_of + responses, int(ends[-1])

        positions = torch.empty(total, dtype=torch.int64)
        unpad = torch.empty(total, dtype=torch.int64)
        buckets, offset = [], 0
        for members, longest in _similar(lengths):
            places = torch.arange(longest)
            prompt, length = prompt_of[members, None], lengths[members, None]
            column = places.minimum(length - 1)
            rows = torch.where(
                column < prompt,
                shared[members, None] + column,
                own[members, None] + column - prompt,
            )
            # The states of a prompt are those of the first sequence in its group.
            mine = (places < length) & ((places >= prompt) | first[members, None])
            unpad[rows[mine]] = offset + mine.flatten().nonzero().squeeze(-1)
            positions[rows[mine]] = column[mine]
            offset += rows.numel()
            buckets.append(Bucket(rows.to(device, non_blocking=True)))
        return cls(
            lengths=tuple(lengths.tolist()),
            positions=positions.to(device, non_blocking=True),
            buckets=tuple(buckets),
            unpad=unpad.to(device, non_blocking=True),
        )


def _similar(sizes: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields (indices of the sequences, longest length) of each bucket, the longest bucket first."""
    order = sizes.argsort(descending=True, stable=True)
    while order.numel():
        longest = int(sizes[order[0]])
        count = int((sizes[order] >= FILL * longest).sum())
        # Within a bucket the sequences stay in packed order, so that gathers are nearly sequential.
        yield order[:count].sort().values, longest
        order = order[count:]
