"""Context parallelism: ranks that take the same micro-batch, and share its tokens.

    batch ─▶ own share ─▶ model, head: scores of the response tokens that own tokens predict
                                       └─ joined ─▶ scores of all response tokens, on every rank ─▶ the loss

A rank's memory and work are those of its share of the tokens, except for a few numbers for each response token.
The loss is computed from all of them, by each rank alike, so that it is what one process computes. Its gradient
goes back to each rank's own scores alone; the ranks' gradients of the weights add up to the batch's.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from areal_q.models.layers.token_share import TokenShare
from learner.backends.data_parallel import Ranks
from learner.data.packing import PackedBatch


def scores_over(
    ranks: Ranks,
    batch: PackedBatch,
    heads: int,
    scores: Callable[[PackedBatch], Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns the scores [T] of all of the batch's response tokens by name, of which `scores` returns those of
    a share; the model has so many query `heads`. Collective over `ranks`, which share the batch's tokens."""
    shared = SharedBatch.of(batch, ranks, heads)
    return shared.joined(scores(shared.own))


class SharedBatch(NamedTuple):
    """A batch whose tokens `ranks` share."""

    whole: PackedBatch
    ranks: Ranks
    own: PackedBatch
    """The batch with the inputs of this rank alone, and with the targets that they predict. All other fields
    are those of the whole batch."""
    places: Tensor | None = None
    """Places of these targets among all response tokens, int64 [t]; None where one rank has all"""

    @classmethod
    def of(cls, batch: PackedBatch, ranks: Ranks, heads: int) -> "SharedBatch":
        """Returns this rank's share of `batch` for a model with so many query `heads`."""
        if ranks.size == 1:
            return cls(batch, ranks, batch)
        share = TokenShare(ranks.rank, ranks.size, ranks.group, len(batch.token_ids), heads)
        first, end = share.own.start, share.own.stop
        places = ((batch.predict >= first) & (batch.predict < end)).nonzero().squeeze(1)
        own = replace(
            batch,
            layout=batch.layout.of_rank(share),
            token_ids=batch.token_ids[share.own],
            predict=batch.predict[places] - first,
            targets=batch.targets[places],
        )
        return cls(batch, ranks, own, places)

    def joined(self, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the scores of all response tokens by name, from those of this rank's. Collective."""
        if self.places is None:
            return dict(scores)
        count, group = len(self.whole.targets), self.ranks.group
        return {n: Joined.apply(own, self.places, count, group) for n, own in scores.items()}


class Joined(torch.autograd.Function):
    """Returns the `count` numbers of which each rank has those at its `places`."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, places: Tensor, count: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.places = places
        whole = own.new_zeros(count).index_copy_(0, places, own)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The loss is the same on every rank, so that its gradient is not summed over them."""
        return grads[0][ctx.places], None, None, None
