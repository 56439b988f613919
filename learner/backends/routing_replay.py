"""Routing replay (R3) and the load-balancing loss, as the backends use them.

The balancing loss is that of Switch Transformers (arXiv 2101.03961, eq. 4-6), a mean over layers, which is 1 if
the load is even:

    E · Σ_e f_e · P_e        f_e: share of the tokens' choices that expert e got (no gradient)
                             P_e: mean probability of e

f is counted over the whole optimizer step, and P is a sum over tokens, so that the gradient does not depend on
how the step is divided into micro-batches and ranks. Notation: T response tokens, L sparse layers, E experts,
K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_q.algorithms import Metrics, Routed
from areal_q.algorithms.reducers import Mean
from areal_q.models import Decoder, DecoderConfig, Routing
from areal_q.models.layers.moe import UNRECORDED, loads
from learner.backends.data_parallel import Ranks
from learner.data.packing import PackedBatch

DISAGREEMENT = "routing/disagreement"


def routing_for(model: Decoder, batch: PackedBatch, replay: bool) -> Routing | None:
    """Returns a routing for the forward of `batch`, or None for a model without experts. With `replay`, tokens
    go to the experts recorded in `batch`."""
    if not model.config.sparse_layers:
        return None
    return Routing(batch.routes if replay else None)


def routed(routing: Routing, batch: PackedBatch, config: DecoderConfig, first: int = 0) -> Routed:
    """Returns the summary of `routing` after a forward of `batch`, over the positions that predict a token that
    counts. The forward ran the layers in `routing`, and consecutive tokens of which `first` is the first."""
    assert config.experts
    layers = sorted(routing.own)
    at = batch.predict[batch.mask]
    at = at[(at >= first) & (at < first + len(routing.own[layers[0]]))]
    here = at - first
    probs = torch.stack([routing.probs[layer][here].sum(0) for layer in layers])
    taken = torch.stack(
        [loads(routing.taken[layer][here].flatten(), config.experts.count) for layer in layers]
    )
    own = torch.stack([routing.own[layer][here] for layer in layers], 1)
    recorded = None if batch.routes is None else batch.routes[at][:, layers]
    return Routed(_disagreement(own, recorded), probs, taken.float())


def _disagreement(own: Tensor, recorded: Tensor | None) -> Metrics:
    """Returns the metric of (token, layer) for which the router's own choice, int64 [T, L, K], is another set
    of experts than the recorded one."""
    if recorded is None:
        return {}
    known = (recorded != UNRECORDED).all(-1)
    differ = (own.sort(-1).values != recorded.sort(-1).values).any(-1)
    return {DISAGREEMENT: Mean(int((differ & known).sum()), int(known.sum()))}


def balance_weights(
    parts: Sequence[Routed], config: DecoderConfig, ranks: Ranks, device: str
) -> Tensor:
    """Returns the weights, float32 [L, E] on `device`, whose sum of products with a micro-batch's
    `Routed.probs` is its share of the balancing loss. `parts` are from this rank's micro-batches of the step,
    which may be none. Collective."""
    assert config.experts
    shape = len(config.sparse_layers), config.experts.count
    taken = sum((part.taken for part in parts), torch.zeros(shape, device=device))
    taken = ranks.add(taken)
    choices = taken.sum(-1, keepdim=True).clamp(min=1)
    tokens = choices / config.experts.per_token
    return config.experts.count * (taken / choices) / tokens / shape[0]
