"""The MLP of a dense layer or of one expert."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.config import Activation
from areal_q.models.layers.linear import Linear


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": gelu_tanh}


class Mlp(nn.Module):
    """A gated MLP, SwiGLU or GeGLU: x [T, width] → [T, width]."""

    def __init__(
        self, width: int, mlp: int, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_proj = Linear(width, mlp, bias=bias)
        self.up_proj = Linear(width, mlp, bias=bias)
        self.down_proj = Linear(mlp, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
