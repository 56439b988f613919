"""The router of Megatron's MoELayer, as the learner's (areal_q/models/moe.py): float32, told which experts to
take and telling which it would. Dispatch, experts and their sharing among ranks are Megatron's.
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_q.models.config import Experts
from areal_q.models.moe import Routing, gates_of


class Router(nn.Module):
    """In place of Megatron's own; `Policy` sets what is not Megatron's."""

    shape: Experts
    layer: int
    """Among the sparse ones"""
    routing: Routing | None = None
    """Of the batch that runs now"""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size))

    def set_layer_number(self, number: int) -> None:
        """Megatron counts all layers, from 1."""

    def forward(self, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """[N, 1, D] → gates float32 [N, E], 0 where not taken, and which are: bool [N, E]."""
        probs = F.linear(hidden.squeeze(1).float(), self.weight.float()).softmax(-1)
        taken = probs.topk(self.shape.per_token, dim=-1).indices
        if self.routing is not None:
            taken = self.routing.choose(self.layer, probs, taken)
        gates = torch.zeros_like(probs).scatter(1, taken, gates_of(probs, taken, self.shape))
        return gates, torch.zeros_like(probs, dtype=torch.bool).scatter(1, taken, True)
