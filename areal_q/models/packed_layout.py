"""The position of each token in a packed batch, computed once for a batch and used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_q.models.layers.token_share import TokenShare

FILL = 0.75
"""Share of the longest sequence in its bucket below which a sequence goes into the next bucket"""

WORTH = 256
"""Number of shared tokens from which on a CPU leaves out their queries, where they are at least half of a
sequence; with fewer, a bucket of their own takes longer than the queries"""


class Segment(NamedTuple):
    """Consecutive tokens of a packed batch. They continue the path of an earlier segment, or begin one."""

    tokens: int
    parent: int | None = None
    """Index of the earlier segment; None for one that begins a path"""
    at: int = 0
    """Number of leading tokens of the parent's path, its own ancestors' included, that this path shares"""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest of them."""

    rows: Tensor
    """Indices into the packed tokens, int64 [sequences, longest]; padding repeats the last token"""
    first: int
    """The first column whose queries are computed"""
    begins: np.ndarray
    """The first column of each sequence that is its segment's own, int64 [sequences]"""
    ends: np.ndarray
    """The column after each sequence's last, int64 [sequences]"""
    queries: Tensor
    """Indices into the tokens whose queries are given, those of the columns from `first` on, int64 [sequences,
    columns]"""

    def cut(self, begin: int, stop: int, of_token: Tensor) -> "Bucket":
        """Returns what the queries in columns `begin` to before `stop` of `queries` need; the query of packed
        token x is the one with the index of_token[x], int64 [T]."""
        begin, stop = self.first + begin, self.first + stop
        return Bucket(
            rows=self.rows[:, :stop],
            first=begin,
            begins=self.begins.clip(begin, stop),
            ends=self.ends.clip(begin, stop),
            queries=of_token[self.rows[:, begin:stop]],
        )


@dataclass(frozen=True)
class PackedLayout:
    """The layout of T tokens of a forest of S segments, one after the other. The path of a segment, which is
    the beginning of its parent's and then its own tokens, is a sequence.

    A token that several sequences share is computed only once. It attends to no token after it, so that its
    hidden state is the same in every sequence that begins with it.

    Example: a prompt a b with the responses c and d e is packed as a b c d e, of segments a b c and, at 2, d e,
    with positions [0, 1, 2, 2, 3]. Its sequences are a b c and a b d e, in one bucket with rows
    [[0, 1, 2, 2], [0, 1, 3, 4]].
    """

    lengths: tuple[int, ...]
    """Number of tokens of each sequence, those that it shares included"""
    paths: np.ndarray
    """Indices into the packed tokens of all tokens of each sequence, one sequence after the other, int64"""
    positions: Tensor
    """Position of each token in its sequences, int64 [T]; where ranks divide the tokens, of this rank's"""
    buckets: tuple[Bucket, ...]
    unpad: Tensor
    """Index of each packed token in the concatenation of the queries of all buckets, int64 [T]"""
    share: TokenShare | None = None
    """The tokens that this rank computes; None for all. Then `buckets` and `unpad` are of the queries that it
    computes, and all else describes the whole batch"""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def of_rank(self, share: TokenShare) -> "PackedLayout":
        """Returns the layout of the same batch for the rank that computes `share` of its tokens."""
        parts = [share.part_of(rank) for rank in range(share.size)]
        found = {part: self._part(*part) for part in parts}
        buckets, unpad, _ = found[parts[share.rank]]
        return replace(
            self,
            positions=self.positions[share.own],
            buckets=buckets,
            unpad=unpad,
            share=replace(share, queries=tuple(found[part][2] for part in parts)),
        )

    def _part(self, part: int, parts: int) -> tuple[tuple[Bucket, ...], Tensor, Tensor]:
        """Returns the buckets of a part of the queries, their `unpad`, and the tokens whose queries they are,
        ascending, int64 [n]."""
        counts = [bucket.queries.numel() for bucket in self.buckets]
        outputs = self.unpad.new_full((sum(counts),), -1)  # the token that takes it, if one does
        outputs[self.unpad] = torch.arange(len(self.unpad), device=self.unpad.device)
        cuts = [
            (bucket, begin, stop, of_bucket.view_as(bucket.queries)[:, begin:stop].flatten())
            for bucket, of_bucket in zip(self.buckets, outputs.split(counts), strict=True)
            for begin, stop in _spans(bucket.queries.shape[1], part, parts)
        ]
        own = torch.cat([outputs[:0], *(tokens for *_, tokens in cuts)])
        taken = (own >= 0).nonzero().squeeze(1)
        unpad = taken[own[taken].argsort()]
        tokens = own[unpad]
        # Queries whose outputs no token takes are anyone's.
        of_token = torch.zeros_like(self.unpad)
        of_token[tokens] = torch.arange(len(tokens), device=tokens.device)
        buckets = [bucket.cut(begin, stop, of_token) for bucket, begin, stop, _ in cuts]
        return tuple(buckets) if len(tokens) else (), unpad, tokens

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "PackedLayout":
        """Returns the layout of sequences that share no tokens. Raises ValueError if one is empty."""
        return cls.of_forest([Segment(length) for length in lengths], device)

    @classmethod
    def of_forest(
        cls, segments: Sequence[Segment], device: torch.device | str = "cpu"
    ) -> "PackedLayout":
        """Returns the layout of `segments`. One that has a parent may be empty.

        Raises ValueError if a path would be empty, or if a segment hangs off none before it or beyond its end.
        """
        depths = _depths(segments)
        own, at = (np.array(x) for x in zip(*[(s.tokens, s.at) for s in segments], strict=True))
        lengths, starts = at + own, own.cumsum() - own
        begins, paths = lengths.cumsum() - lengths, ranges(starts - at, lengths)
        for depth in range(1, max(depths) + 1):
            members = np.flatnonzero(np.array(depths) == depth)
            parents = np.array([segments[i].parent for i in members.tolist()])
            paths[ranges(begins[members], at[members])] = paths[
                ranges(begins[parents], at[members])
            ]
        trims = torch.device(device).type == "cpu"  # a GPU's fast attention takes no mask
        queries = np.zeros_like(starts)
        buckets, offset = [], 0
        for members, first in _similar(lengths, np.where(trims & (at >= WORTH), at, 0)):
            longest = lengths[members].max()
            column = np.minimum(np.arange(longest), lengths[members, None] - 1)
            rows = torch.from_numpy(paths[begins[members, None] + column])
            width = longest - first
            queries[members] = offset + np.arange(len(members)) * width + at[members] - first
            offset += len(members) * width
            on_device, first = rows.to(device, non_blocking=True), int(first)
            queries_of = on_device[:, first:]
            buckets.append(Bucket(on_device, first, at[members], lengths[members], queries_of))
        return cls(
            lengths=tuple(lengths.tolist()),
            paths=paths,
            positions=torch.from_numpy(ranges(at, own)).to(device, non_blocking=True),
            buckets=tuple(buckets),
            unpad=torch.from_numpy(ranges(queries, own)).to(device, non_blocking=True),
        )


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns so many consecutive numbers from each start, one range after the other, int64 [Σ counts]."""
    before = counts.cumsum() - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _spans(columns: int, part: int, parts: int) -> list[tuple[int, int]]:
    """Returns the columns that a part of the queries has, as (first, end): of 2 · `parts` ranges the n-th from
    the left and the n-th from the right, so that its queries see as many keys as another part's do."""
    numbers = (part, part + 1, 2 * parts - part - 1, 2 * parts - part)
    left, end, begin, right = (columns * number // (2 * parts) for number in numbers)
    spans = [(left, right)] if part + 1 == parts else [(left, end), (begin, right)]
    return [(first, end) for first, end in spans if first < end]


def _depths(segments: Sequence[Segment]) -> list[int]:
    """Returns the number of ancestors of each segment. Raises what `of_forest` raises."""
    if not segments or any(s.tokens < 0 or s.tokens + s.at < 1 for s in segments):
        raise ValueError("a packed batch needs sequences of at least one token")
    depths: list[int] = []
    for number, (_, parent, at) in enumerate(segments):
        if parent is None:
            depths.append(0)
        elif 0 <= parent < number and 0 < at <= segments[parent].at + segments[parent].tokens:
            depths.append(depths[parent] + 1)
        else:
            raise ValueError(f"segment {number} hangs off token {at} of segment {parent}")
    return depths


def _similar(lengths: np.ndarray, shared: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (indices of the sequences, first query) of each bucket. The queries of the first `shared` tokens,
    int64 [S], may be left out, which is done if these are half of a sequence: causal attention of all tokens
    leaves out half of the products by itself."""
    halvings = np.log2(lengths / np.maximum(lengths - shared, 1)).astype(np.int64)
    for times in np.unique(halvings):
        order = np.flatnonzero((halvings == times) & (lengths > shared))
        order = order[np.argsort(-lengths[order], kind="stable")]
        while len(order):
            count = int((lengths[order] >= FILL * lengths[order[0]]).sum())
            # Within a bucket the sequences stay in packed order, so that gathers are nearly sequential.
            members = np.sort(order[:count])
            yield members, shared[members].min() if times else 0
            order = order[count:]
