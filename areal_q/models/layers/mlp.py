"""The MLP of a dense layer or of one expert."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.config import Activation
from areal_q.models.layers.linear import Linear
from areal_q.models.variants import ALPHA, LIMIT


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


GATED: dict[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": geglu,
    "clamped_silu": clamped_swiglu,
}
"""Functions of gate and up, [T, mlp] each → [T, mlp]"""


class Mlp(nn.Module):
    """A gated MLP: x [T, width] → [T, width]."""

    def __init__(
        self, width: int, mlp: int, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.gated = GATED[activation]
        self.gate_proj = Linear(width, mlp, bias=bias)
        self.up_proj = Linear(width, mlp, bias=bias)
        self.down_proj = Linear(mlp, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
