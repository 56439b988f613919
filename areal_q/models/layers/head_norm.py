"""The RMSNorm over the queries or keys of each head."""

from torch import Tensor, nn


class HeadNorm(nn.RMSNorm):
    """An RMSNorm that computes in the dtype of its weight, whatever the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))
