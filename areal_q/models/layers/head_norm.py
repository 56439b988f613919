"""The norm of each head's queries or keys."""

from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """In the type of its weight, whatever the projection before it computes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
