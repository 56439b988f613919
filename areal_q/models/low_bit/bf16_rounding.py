"""What no format applies to, as engines that compute in bfloat16 have it: embedding, norms, biases, head.

With `rollout.unquantized = "bf16"` these tensors travel in bfloat16. A learner whose forward is that of
rollouts then rounds them too; the gradient goes straight through to the float32 master weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.layers.head_norm import HeadNorm
from areal_q.models.layers.linear import Linear


def straight(x: Tensor) -> Tensor:
    """x rounded to bfloat16, in its own dtype, with the gradient of x. Exact: the difference is."""
    return x + (x.detach().to(torch.bfloat16).to(x.dtype) - x.detach())


class RoundedEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return straight(F.embedding(input, self.weight))


class RoundedNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(self.normalized_shape), straight(self.weight), self.eps)


class RoundedHeadNorm(RoundedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


_KINDS: dict[type, type] = {
    nn.Embedding: RoundedEmbedding,
    nn.RMSNorm: RoundedNorm,
    HeadNorm: RoundedHeadNorm,
}
_PLAIN = {rounded: plain for plain, rounded in _KINDS.items()}


def round_rest(model: nn.Module, on: bool = True) -> None:
    """Turns on or off that the forward of `model` rounds what is not quantized. Its parameters stay the same
    objects, as optimizers know them."""
    kinds = _KINDS if on else _PLAIN
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]  # another forward on the same state
        elif isinstance(module, Linear):
            module.rounds_rest = on


@torch.no_grad()
def round_frozen(model: nn.Module) -> None:
    """Rounds, once and for all, the float32 parameters and biases that are not trained."""
    biases = (t for name, t in model.named_buffers() if name.endswith(".bias"))
    for tensor in (*(p for p in model.parameters() if not p.requires_grad), *biases):
        if tensor.dtype == torch.float32:
            tensor.copy_(tensor.to(torch.bfloat16))
