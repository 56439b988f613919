"""A packed batch whose tokens several ranks divide, and attention over all of them: Ulysses (arXiv 2309.14509).

    q, k, v of own tokens, all heads ──all-to-all──▶ of all tokens, own heads ─▶ attention of the whole batch
    outputs of own tokens, all heads ◀─all-to-all──  outputs of all tokens, own heads ◀──────────┘

A rank's tokens are consecutive, and so are its heads; ranks may have one more or fewer than others. Of the key
and value heads each rank gets those that its query heads use, so that several ranks may get the same one.
Everything but attention is computed token by token, by the rank that has the token.

Notation: T tokens of the batch, t of a rank; H query heads, G key and value heads, h and g those of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TokenShare:
    """One rank's share of `total` packed tokens."""

    rank: int
    size: int
    """Number of ranks that divide the tokens"""
    group: dist.ProcessGroup | None
    total: int

    def tokens(self, rank: int) -> slice:
        """Returns the tokens of `rank`."""
        return _part(self.total, rank, self.size)

    @property
    def own(self) -> slice:
        """The tokens of this rank."""
        return self.tokens(self.rank)

    def gather_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [T, h, head_dim] of this rank's heads, and the keys and values for them, [T, g,
        head_dim] where each serves equally many of the queries' heads, else [T, h, head_dim]. q is [t, H,
        head_dim], k and v are [t, G, head_dim]. Collective, as is its gradient."""
        heads, serves = q.shape[1], q.shape[1] // k.shape[1]
        of_q = [_part(heads, rank, self.size) for rank in range(self.size)]
        of_k = [slice(at.start // serves, (at.stop - 1) // serves + 1) for at in of_q]
        pairs = zip(of_q, of_k, strict=True)
        sent = [torch.cat((q[:, a], k[:, b], v[:, b]), 1) for a, b in pairs]
        mine, keys = of_q[self.rank], of_k[self.rank]
        h, g = mine.stop - mine.start, keys.stop - keys.start
        received = _exchange(
            sent, [(self._count(r), h + 2 * g, q.shape[2]) for r in self._ranks], self
        )
        q, k, v = torch.cat(received).split((h, g, g), 1)
        if h != g * serves:
            used = torch.arange(mine.start, mine.stop, device=q.device) // serves - keys.start
            k, v = k.index_select(1, used), v.index_select(1, used)
        return q, k, v

    def gather_heads(self, out: Tensor, heads: int) -> Tensor:
        """Returns the outputs of all `heads` for this rank's tokens, [t, H, head_dim], from those of its heads
        for all tokens, [T, h, head_dim]. Collective, as is its gradient."""
        sent = [out[self.tokens(rank)] for rank in self._ranks]
        parts = [_part(heads, rank, self.size) for rank in self._ranks]
        shapes = [(self._count(self.rank), at.stop - at.start, out.shape[2]) for at in parts]
        return torch.cat(_exchange(sent, shapes, self), 1)

    @property
    def _ranks(self) -> range:
        return range(self.size)

    def _count(self, rank: int) -> int:
        at = self.tokens(rank)
        return at.stop - at.start


def _part(count: int, rank: int, size: int) -> slice:
    return slice(count * rank // size, count * (rank + 1) // size)


def _exchange(
    sent: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], share: TokenShare
) -> list[Tensor]:
    """Sends the n-th tensor to rank n, and returns what each rank sent here, which has the n-th of `shapes`."""
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([tensor.flatten() for tensor in sent])
    received: Any = AllToAll.apply(flat, [x.numel() for x in sent], counts, share.group)
    return [x.view(shape) for x, shape in zip(received.split(counts), shapes, strict=True)]


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
