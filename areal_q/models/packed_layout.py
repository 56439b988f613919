"""The place of each token of a packed batch: computed once a batch, used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FILL = 0.75
"""A sequence shorter than this share of its bucket's longest one opens the next bucket."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """int64 [sequences, longest] into the packed tokens; padding repeats the last token."""


@dataclass(frozen=True)
class PackedLayout:
    """T tokens of S sequences, one after the other; sequences of a group share their prompt's tokens.

    A shared prompt is computed once: what a token attends to does not depend on the tokens after it, so
    its hidden state is the same in every sequence that starts with it.

    Example: one group with prompt a b and responses c, d e: packed a b c d e, positions [0, 1, 2, 2, 3],
    sequences a b c and a b d e; one bucket with rows [[0, 1, 2, 2], [0, 1, 3, 4]].
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence, its prompt included."""
    positions: Tensor
    """int64 [T] place of each token in its sequence."""
    buckets: tuple[Bucket, ...]
    unpad: Tensor
    """int64 [T]: where each packed token stands in the concatenation of all buckets."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedLayout":
        """Sequences that share nothing. Raises ValueError unless all have at least one token."""
        return cls.of_groups([(length, (0,)) for length in lengths], device)

    @classmethod
    def of_groups(
        cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu"
    ) -> "PackedLayout":
        """Groups of (prompt length, response lengths): packed as prompt, response, response, …

        Raises ValueError unless every prompt has at least one token and every group a response, which
        may be empty.
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
        # Each response's end in the packed order, and from it where it and its group's prompt start.
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
            # A prompt's states are taken from the first sequence of its group, the others from their own.
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
    """(indices of the sequences, longest length) of each bucket, the longest bucket first."""
    order = sizes.argsort(descending=True, stable=True)
    while order.numel():
        longest = int(sizes[order[0]])
        count = int((sizes[order] >= FILL * longest).sum())
        # Within a bucket in packed order, which keeps the gathers nearly sequential.
        yield order[:count].sort().values, longest
        order = order[count:]
