"""The router of Megatron's MoELayer, as the learner's (areal_q/models/layers/moe.py): float32, told which
experts to take and telling which it would. Dispatch, experts and their sharing among ranks are Megatron's.

What routers tell (learner/backends/routing_replay.py) is wanted where the loss is, on the last stage of the
pipeline. It is a sum over tokens, a few numbers for each layer, and rides below the hidden states that a stage
sends to the next:

    [N, 1, D] ┬ hidden states
    [k, 1, D] ┴ told: probabilities [L, E], choices [L, E], disagreements, tokens that have recorded routes

Gradients go back the same way. Every stage adds its own layers to what it was told.
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_q.algorithms import Routed
from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.models import config as shapes
from areal_q.models.config import DecoderConfig
from areal_q.models.layers.moe import Routing, gates_of
from areal_q.models.low_bit.bf16_rounding import straight
from learner.backends.routing_replay import DISAGREEMENT, routed
from learner.data.packing import PackedBatch


class Router(nn.Module):
    """In place of Megatron's own; `Policy` sets what is not Megatron's."""

    shape: shapes.Experts
    layer: int
    """Among the sparse ones"""
    routing: Routing | None = None
    """Of the batch that runs now"""
    rounds_rest = False

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def set_layer_number(self, number: int) -> None:
        """Megatron counts all layers, from 1."""

    def forward(self, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """[N, 1, D] → gates float32 [N, E], 0 where not taken, and which are: bool [N, E]."""
        weight = straight(self.weight) if self.rounds_rest else self.weight
        probs = F.linear(hidden.squeeze(1).float(), weight.float()).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if self.routing is not None:
            taken = self.routing.choose(self.layer, probs, taken)
        gates = torch.zeros_like(probs).scatter(1, taken, gates_of(probs, taken, self.shape))
        return gates, torch.zeros_like(probs, dtype=torch.bool).scatter(1, taken, True)


class Experts(SequentialMLP):
    """This rank's. Gates multiply what an expert says: Megatron's multiply what its last linear is told, which
    here may be quantized."""

    def forward(self, x: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        y, _ = super().forward(x, counts, torch.ones_like(gates))
        return y * gates.unsqueeze(-1), None


def told_size(shape: DecoderConfig) -> int:
    """Numbers that the routers of a model tell of a batch"""
    if not shape.sparse_layers or not shape.experts:
        return 0
    return 2 * len(shape.sparse_layers) * shape.experts.count + 2


def silence(shape: DecoderConfig, device: torch.device) -> Tensor:
    return torch.zeros(told_size(shape), device=device)


def tell(routing: Routing, batch: PackedBatch, shape: DecoderConfig, first: int) -> Tensor:
    """float32 [told_size], 0 for the layers of other stages; the probabilities with gradient. Tokens of this
    rank's routers begin with `first`. Collective over tensor-parallel ranks."""
    assert shape.experts
    own = routed(routing, batch, shape, first)
    layers = torch.tensor(sorted(routing.own), device=own.probs.device)
    sums = own.probs.new_zeros(2, len(shape.sparse_layers), shape.experts.count)
    sums = sums.index_add(1, layers, torch.stack([own.probs, own.taken]))
    differ = own.metrics.get(DISAGREEMENT, Mean(0, 0))
    assert isinstance(differ, Mean)
    told = torch.cat([sums.flatten(), sums.new_tensor([differ.sum, differ.count])])
    return reduce_from_tensor_model_parallel_region(told)


def heard(told: Tensor, batch: PackedBatch, shape: DecoderConfig) -> Routed:
    """What the routers of all stages told of `batch`."""
    assert shape.experts
    probs, taken = told[:-2].view(2, -1, shape.experts.count)
    differ, known = map(int, told[-2:].detach())
    metrics: Metrics = {} if batch.routes is None else {DISAGREEMENT: Mean(differ, known)}
    return Routed(metrics, probs, taken.detach())


def stacked(told: Tensor, hidden: Tensor) -> Tensor:
    """As rows [k, 1, D] to stand below `hidden`."""
    width = hidden.shape[-1]
    return F.pad(told, (0, -len(told) % width)).unflatten(0, (-1, 1, width))


def unstacked(rows: Tensor, size: int) -> Tensor:
    return rows.flatten()[:size]
