"""A packed batch whose tokens several ranks divide, and attention over all of them: Ulysses (arXiv 2309.14509).

    q, k, v of own tokens, all heads ──all-to-all──▶ of all tokens, own heads ─▶ attention of the whole batch
    outputs of own tokens, all heads ◀─all-to-all──  outputs of all tokens, own heads ◀──────────┘

A rank's tokens are consecutive, and so are its heads; ranks may have one more or fewer than others. Of the key
and value heads each rank gets those that its query heads use, so that several ranks may get the same one.
Everything but attention is computed token by token, by the rank that has the token.

Where there are fewer heads than ranks, neighbours have the same one, and each computes a part of its queries
(PackedLayout.of_rank). In place of a ring (arXiv 2310.01889), in which keys and values of all heads go round,
each then holds one head's for all tokens: 2 · T · head_dim numbers in a layer, however many ranks there are.

Notation: T tokens of the batch, t of a rank; H query heads, G key and value heads, h and g those of a rank; n
queries that a rank computes of each of its heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TokenShare:
    """One rank's share of `total` packed tokens, whose attention has so many query `heads`."""

    rank: int
    size: int
    """Number of ranks that divide the tokens"""
    group: dist.ProcessGroup | None
    total: int
    heads: int
    queries: tuple[Tensor, ...] = ()
    """The tokens whose queries each rank computes, ascending, int64 [n]; PackedLayout.of_rank finds them"""

    def tokens(self, rank: int) -> slice:
        """Returns the tokens of `rank`."""
        return _part(self.total, rank, self.size)

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        return self.tokens(self.rank)

    def heads_of(self, rank: int) -> slice:
        """Returns the query heads of `rank`."""
        if self.heads >= self.size:
            return _part(self.heads, rank, self.size)
        head = ((rank + 1) * self.heads - 1) // self.size  # the one of whose ranks this is one
        return slice(head, head + 1)

    def part_of(self, rank: int) -> tuple[int, int]:
        """Returns which part, of how many, `rank` computes of the queries of its heads."""
        same = [other for other in self._ranks if self.heads_of(other) == self.heads_of(rank)]
        return same.index(rank), len(same)

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [n, h, head_dim] of this rank's heads, and the keys and values for them, [T, g,
        head_dim] where each serves equally many of the queries' heads, else [T, h, head_dim]. q is [t, H,
        head_dim], k and v are [t, G, head_dim]. Collective, as is its gradient."""
        serves, width = q.shape[1] // k.shape[1], q.shape[2]
        of_q = [self.heads_of(rank) for rank in self._ranks]
        of_k = [slice(at.start // serves, (at.stop - 1) // serves + 1) for at in of_q]
        sent = [
            torch.cat([x.flatten() for x in (q[:, a].index_select(0, at), k[:, b], v[:, b])])
            for at, a, b in zip(self._own_queries, of_q, of_k, strict=True)
        ]
        mine, keys = of_q[self.rank], of_k[self.rank]
        h, g = mine.stop - mine.start, keys.stop - keys.start
        each = [
            (n * h * width, *[_count(self.tokens(rank)) * g * width] * 2)
            for rank, n in enumerate(self._counts[self.rank])
        ]
        received = _exchange(sent, [sum(counts) for counts in each], self.group)
        parts = received.split([count for counts in each for count in counts])
        q, k, v = (torch.cat(parts[x::3]).view(-1, y, width) for x, y in enumerate((h, g, g)))
        if h != g * serves:
            used = torch.arange(mine.start, mine.stop, device=q.device) // serves - keys.start
            k, v = k.index_select(1, used), v.index_select(1, used)
        return q, k, v

    def gather_heads(self, out: Tensor) -> Tensor:
        """Returns the outputs of all heads for this rank's tokens, [t, H, head_dim], from those that it
        computed, [n, h, head_dim]. Collective, as is its gradient."""
        width = out.shape[2]
        sent = out.split(self._counts[self.rank])
        counts = [
            len(at) * _count(self.heads_of(rank)) * width
            for rank, at in enumerate(self._own_queries)
        ]
        received = _exchange([x.flatten() for x in sent], counts, self.group)
        in_order = received.view(-1, width).index_select(0, self._order)
        return in_order.view(-1, self.heads, width)

    @property
    def _ranks(self) -> range:
        return range(self.size)

    @cached_property
    def _counts(self) -> list[list[int]]:
        """Number of the queries of each rank that belong to the tokens of each."""
        ends = torch.tensor([self.tokens(rank).stop for rank in self._ranks])
        before = [torch.searchsorted(queries.cpu(), ends) for queries in self.queries]
        return [x.diff(prepend=x.new_zeros(1)).tolist() for x in before]

    @cached_property
    def _own_queries(self) -> list[Tensor]:
        """The tokens of this rank whose queries each rank computes, counted from its first one."""
        parts = zip(self.queries, self._counts, strict=True)
        return [queries.split(counts)[self.rank] - self.own.start for queries, counts in parts]

    @cached_property
    def _order(self) -> Tensor:
        """The places, among the outputs that all ranks send, of those of each token and head, int64 [t · H]."""
        found = []
        for rank, at in enumerate(self._own_queries):
            of = self.heads_of(rank)
            heads = torch.arange(of.start, of.stop, device=at.device)
            found.append((at[:, None] * self.heads + heads).flatten())
        return torch.cat(found).argsort()


def _part(count: int, rank: int, size: int) -> slice:
    return slice(count * rank // size, count * (rank + 1) // size)


def _count(at: slice) -> int:
    return at.stop - at.start


def _exchange(sent: Sequence[Tensor], counts: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends the n-th flat tensor to rank n, and returns what all ranks sent here, so many numbers each."""
    received: Any = AllToAll.apply(torch.cat(list(sent)), [len(x) for x in sent], counts, group)
    return received


class AllToAll(torch.autograd.Function):
    """Sends the parts of a flat tensor, which have `sent` numbers each, to one rank each, and returns what they
    sent, `received` numbers from each. The gradient goes the same ways back."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = flat.new_empty(sum(received))
        dist.all_to_all_single(out, flat, received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = AllToAll.apply(grads[0].contiguous(), ctx.received, ctx.sent, ctx.group)
        return back, None, None, None
