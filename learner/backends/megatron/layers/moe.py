"""A router for Megatron's MoELayer that computes as ours (areal_q/models/layers/moe.py): in float32, with the
recorded experts if routing is replayed. So does the gate of an expert that all tokens share. Dispatch, experts
and their division among ranks are Megatron's.

Routers report how they routed (learner/backends/routing_replay.py). The loss needs the report on the last stage
of the pipeline. It is a sum over tokens, a few numbers per layer, and is sent as further rows below the hidden
states that a stage sends to the next:

    [N, 1, D] ┬ hidden states [k, 1, D] ┴ the report: probabilities [L, E], choices [L, E], disagreements,
    tokens that have recorded routes

Gradients return the same way. Every stage adds its own layers to the report that it received.
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
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
    """The router in place of Megatron's own; `MegatronModel` sets the attributes that
    Megatron does not know."""

    shape: shapes.Experts
    layer: int
    """The number of its layer among the sparse ones."""
    routing: Routing | None = None
    """The routing of the present batch."""
    rounds_rest = False

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def set_layer_number(self, number: int) -> None:
        """Does nothing: Megatron counts all layers, from 1."""

    def forward(self, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns, for hidden states [N, 1, D], the gates, float32 [N, E], 0 for experts that are not chosen,
        and bool [N, E], True for the chosen ones."""
        probs = _logits(hidden.squeeze(1), self.weight, self.rounds_rest).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if self.routing is not None:
            taken = self.routing.choose(self.layer, probs, taken)
        gates = torch.zeros_like(probs).scatter(1, taken, gates_of(probs, taken, self.shape))
        return gates, torch.zeros_like(probs, dtype=torch.bool).scatter(1, taken, True)


class Experts(SequentialMLP):
    """This rank's experts. Gates multiply an expert's output; in Megatron's own class they multiply the input
    of the expert's last linear, which may be quantized here."""

    def forward(self, x: Tensor, counts: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        y, _ = super().forward(x, counts, torch.ones_like(gates))
        return y * gates.unsqueeze(-1), None


class SharedExpert(SharedExpertMLP):
    """The expert that all tokens share, on tensor-parallel ranks divided as a dense MLP is, behind its gate."""

    rounds_rest = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        y, _ = MLP.forward(self, hidden_states)
        return y * _logits(hidden_states, self.gate_weight, self.rounds_rest).sigmoid()


def _logits(hidden: Tensor, weight: Tensor, rounds: bool) -> Tensor:
    """Returns what decides about experts, in float32; `rounds` is True if the weight is rounded."""
    return F.linear(hidden.float(), (straight(weight) if rounds else weight).float())


def report_size(shape: DecoderConfig) -> int:
    """Returns the number of values in a report; 0 for a model without experts."""
    if not shape.sparse_layers or not shape.experts:
        return 0
    return 2 * len(shape.sparse_layers) * shape.experts.count + 2


def empty_report(shape: DecoderConfig, device: torch.device) -> Tensor:
    """Returns a report to which no layer has been added."""
    return torch.zeros(report_size(shape), device=device)


def make_report(routing: Routing, batch: PackedBatch, shape: DecoderConfig, first: int) -> Tensor:
    """Returns the report of this stage's layers, float32 [report_size], with 0 for the layers of other
    stages. The probabilities have a gradient. `first` is the first token that this rank's routers ran on.
    Collective over tensor-parallel ranks."""
    assert shape.experts
    own = routed(routing, batch, shape, first)
    layers = torch.tensor(sorted(routing.own), device=own.probs.device)
    sums = own.probs.new_zeros(2, len(shape.sparse_layers), shape.experts.count)
    sums = sums.index_add(1, layers, torch.stack([own.probs, own.taken]))
    differ = own.metrics.get(DISAGREEMENT, Mean(0, 0))
    assert isinstance(differ, Mean)
    report = torch.cat([sums.flatten(), sums.new_tensor([differ.sum, differ.count])])
    return reduce_from_tensor_model_parallel_region(report)


def read_report(report: Tensor, batch: PackedBatch, shape: DecoderConfig) -> Routed:
    """Returns the content of the finished report about `batch`."""
    assert shape.experts
    probs, taken = report[:-2].view(2, -1, shape.experts.count)
    differ, known = map(int, report[-2:].detach())
    metrics: Metrics = {} if batch.routes is None else {DISAGREEMENT: Mean(differ, known)}
    return Routed(metrics, probs, taken.detach())


def report_rows(report: Tensor, hidden: Tensor) -> Tensor:
    """Returns the report, padded, as rows [k, 1, D] of the width of `hidden`."""
    width = hidden.shape[-1]
    return F.pad(report, (0, -len(report) % width)).unflatten(0, (-1, 1, width))


def report_of_rows(rows: Tensor, size: int) -> Tensor:
    """Returns the report of `size` numbers that `report_rows` made into rows."""
    return rows.flatten()[:size]
