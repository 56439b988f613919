"""Mixtures of experts: a router, the experts that it chooses for each token, and their replay.

    p = softmax(W_r · x)          in float32, over all E experts
    S = the K largest of p        or, replayed, those that the rollout took
    g_e = p_e / Σ_{j∈S} p_j       for e ∈ S (undivided where the model says so)
    y = Σ_{e∈S} g_e · expert_e(x)

**Routing replay** (R3, arXiv 2510.11370): a quantized engine and the learner now and then rank two experts
differently, and the token then runs through other weights altogether. With the rollout's S, and gates that are
computed anew from the learner's own router, both sides run the same experts; gradients reach the router through
the gates.

Weights keep the names of Hugging Face's checkpoints, a 2-D matrix for each linear of each expert, so that
formats, UAQ, Muon and sharding see ordinary linears. transformers 5 fuses them when it loads, and takes them
apart when it saves.

Notation: T tokens, D width, E experts, K experts a token, L sparse layers.
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
"""In place of an expert's number, where nobody wrote down which it was."""


class Routing:
    """What the sparse layers of one forward are told, and tell. By sparse layer, 0 … L - 1.

    No dataclass: FSDP2 would hand each layer a copy.
    """

    def __init__(self, recorded: Tensor | None = None) -> None:
        self.recorded = recorded
        """int [T, L, K]: experts to take; UNRECORDED for tokens that take the router's own."""
        self.own: dict[int, Tensor] = {}
        """int64 [T, K]: the router's choice."""
        self.taken: dict[int, Tensor] = {}
        """int64 [T, K]: the experts that were run."""
        self.probs: dict[int, Tensor] = {}
        """float32 [T, E] with gradient: the router's distribution."""

    def choose(self, layer: int, probs: Tensor, own: Tensor) -> Tensor:
        """Returns the experts to run, int64 [T, K]. A layer that runs again (activation checkpointing) says
        the same again."""
        taken = own
        if self.recorded is not None:
            recorded = self.recorded[:, layer].to(own.dtype)
            taken = torch.where(recorded == UNRECORDED, own, recorded)
        self.own[layer], self.taken[layer], self.probs[layer] = own, taken, probs
        return taken


class Router(Linear):
    """weight [E, D]; float32 whatever the model computes in, and never quantized."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__(width, experts, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """float32 [T, E]: each token's distribution over the experts."""
        weight = straight(self.weight) if self.rounds_rest else self.weight
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), weight.float()).softmax(-1)


class SparseMlp(nn.Module):
    """In place of a dense layer's Mlp."""

    def __init__(self, config: DecoderConfig, experts: Experts, layer: int) -> None:
        """`layer` counts the sparse ones."""
        super().__init__()
        self.shape, self.layer = experts, layer
        self.gate = Router(config.width, experts.count)
        self.experts = nn.ModuleList(Mlp(config.width, experts.mlp) for _ in range(experts.count))

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        probs = self.gate(x)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if routing is not None:
            taken = routing.choose(self.layer, probs, taken)
        return mixed(x, taken, gates_of(probs, taken, self.shape), list(self.experts))


def gates_of(probs: Tensor, taken: Tensor, shape: Experts) -> Tensor:
    """float32 [T, K]: what the experts `taken` int64 [T, K] count for."""
    gates = probs.gather(-1, taken)
    return gates / gates.sum(-1, keepdim=True) if shape.normalised else gates


def loads(taken: Tensor, experts: int) -> Tensor:
    """int64 [E]: how often each expert is in `taken` int64 [N]."""
    # bincount() looks for the largest and the smallest first, and waits for a GPU each time.
    return taken.new_zeros(experts).index_add_(0, taken, torch.ones_like(taken))


def mixed(
    x: Tensor, taken: Tensor, gates: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """Σ_k gates[t, k] · experts[taken[t, k]](x[t]), [T, D].

    Tokens are sorted by expert, so that each expert runs once. It runs on no token as well: every weight then
    has a gradient, if only 0, on every rank of a sharded model.
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
