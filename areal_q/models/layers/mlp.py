"""The MLP of a dense layer or of one expert."""

import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.layers.linear import Linear


class Mlp(nn.Module):
    """A SwiGLU MLP: x [T, width] → [T, width]."""

    def __init__(self, width: int, mlp: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(width, mlp, bias=bias)
        self.up_proj = Linear(width, mlp, bias=bias)
        self.down_proj = Linear(mlp, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
