"""Mixtures of experts: a router, the experts that it chooses for each token, and their replay.

    p = softmax(W_r · x + b_r)    in float32, over all E experts (gpt-oss alone has b_r)
    S = the K largest of p        or, with routing replay, those of the rollout
    g_e = p_e / Σ_{j∈S} p_j       for e ∈ S (not divided if the model says so); gpt-oss' softmax over S alone
    y = Σ_{e∈S} g_e · expert_e(x)   (+ σ(w_s · x) · shared(x), an expert that all tokens share)

**Routing replay** (R3, arXiv 2510.11370): now and then a quantized engine and the learner rank two experts
differently, and the token then runs through entirely different weights. With the rollout's S, and gates that
are computed anew from the learner's own router, both sides run the same experts. Gradients reach the router
through the gates.

Weights have the names of Hugging Face's checkpoints, with a 2-D matrix for each linear layer of each expert, so
that formats, UAQ, Muon and sharding can treat them as ordinary linear layers. transformers 5 fuses them when it
loads a checkpoint, and splits them when it saves one; some families' files have them fused
(areal_q/models/hf/stored_layout.py).

Notation: T tokens, D width, E experts, K experts for each token, L sparse layers.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.config import DecoderConfig, Experts
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.mlp import Mlp
from areal_q.models.low_bit.bf16_rounding import straight

UNRECORDED = -1
"""Stands for an expert that was not recorded"""


class Routing:
    """The experts that the sparse layers of one forward pass shall use, and those that they choose, by sparse
    layer 0 … L - 1.

    It is not a dataclass, since FSDP2 would give each layer a copy.
    """

    def __init__(self, recorded: Tensor | None = None) -> None:
        self.recorded = recorded
        """Experts to use, int [T, L, K]; UNRECORDED for tokens that use the router's choice"""
        self.own: dict[int, Tensor] = {}
        """The router's choice by layer, int64 [T, K]"""
        self.taken: dict[int, Tensor] = {}
        """The experts that were run by layer, int64 [T, K]"""
        self.probs: dict[int, Tensor] = {}
        """The router's distribution by layer, float32 [T, E] with gradient"""

    def choose(self, layer: int, probs: Tensor, own: Tensor) -> Tensor:
        """Returns the experts to run, int64 [T, K], and records the layer's choice. A layer that runs again in
        the backward pass records the same again."""
        taken = own
        if self.recorded is not None:
            recorded = self.recorded[:, layer].to(own.dtype)
            taken = torch.where(recorded == UNRECORDED, own, recorded)
        self.own[layer], self.taken[layer], self.probs[layer] = own, taken, probs
        return taken


class ExactLinear(Linear):
    """A linear layer, with weight [E, D], that decides about experts: x [T, D] → float32 [T, E]. It computes in
    float32 whatever the model's dtype, and is never quantized."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if self.rounds_rest:
            weight, bias = straight(weight), None if bias is None else straight(bias)
        with torch.autocast(input.device.type, enabled=False):
            bias = None if bias is None else bias.float()
            return F.linear(input.float(), weight.float(), bias)


class SparseMlp(nn.Module):
    """The mixture of experts that a sparse layer has instead of an Mlp: x [T, D] → [T, D]."""

    def __init__(self, config: DecoderConfig, experts: Experts, layer: int) -> None:
        """Builds the mixture of sparse layer number `layer`, which counts the sparse layers alone."""
        super().__init__()
        self.shape, self.layer = experts, layer
        self.gate = ExactLinear(config.width, experts.count, bias=config.mlp_bias)
        of_each = config.width, experts.mlp, config.mlp_bias, config.activation
        self.experts = nn.ModuleList(Mlp(*of_each) for _ in range(experts.count))
        if experts.shared:
            self.shared_expert = Mlp(config.width, experts.shared)
            self.shared_expert_gate = ExactLinear(config.width, 1, bias=False)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        probs = self.gate(x).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if routing is not None:
            taken = routing.choose(self.layer, probs, taken)
        y = mixed(x, taken, gates_of(probs, taken, self.shape), list(self.experts))
        if self.shape.shared:
            y = y + (self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)).to(x.dtype)
        return y


def gates_of(probs: Tensor, taken: Tensor, shape: Experts) -> Tensor:
    """Returns the gates of the experts `taken` int64 [T, K], float32 [T, K]."""
    gates = probs.gather(-1, taken)
    return gates / gates.sum(-1, keepdim=True) if shape.normalised else gates


def loads(taken: Tensor, experts: int) -> Tensor:
    """Returns how often each expert occurs in `taken` int64 [N], as int64 [E]."""
    # bincount() would wait for a GPU, since it computes the largest and the smallest value first.
    return taken.new_zeros(experts).index_add_(0, taken, torch.ones_like(taken))


def mixed(
    x: Tensor, taken: Tensor, gates: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Returns Σ_k gates[t, k] · experts[taken[t, k]](x[t]) for each token t, [T, D].

    Tokens are sorted by expert, so that each expert runs once. An expert without tokens runs too, so that on
    every rank of a sharded model every weight has a gradient, which may be 0.
    """
    rows, per_token = taken.shape
    flat = taken.flatten()
    order = flat.argsort(stable=True)
    counts = loads(flat, len(experts)).tolist()
    parts = x.index_select(0, order // per_token).split(counts)
    outs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    by_token = outs.index_select(0, places).view(rows, per_token, -1)
    return (by_token * gates.unsqueeze(-1)).sum(1).to(x.dtype)
