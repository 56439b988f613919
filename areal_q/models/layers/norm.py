"""The decoder's RMSNorms besides torch's own: over each head, and with weights that are added to 1."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """Returns `x` in float32, or in a dtype of its own that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class HeadNorm(nn.RMSNorm):
    """An RMSNorm that computes in the dtype of its weight, whatever the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class OffsetNorm(nn.RMSNorm):
    """An RMSNorm that multiplies by 1 + w, as Gemma's does, in float32 and rounded to the dtype of w. The
    parameter is w, as files have it: 1 + w would round what is small."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    @property
    def added(self) -> Tensor:
        """What is added to 1, float [width]"""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + wide(self.added)
        normed = F.rms_norm(wide(x), list(self.normalized_shape), weight, self.eps)
        return normed.to(self.weight.dtype)
