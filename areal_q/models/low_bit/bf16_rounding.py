"""Rounding to bfloat16: of the tensors that no format quantizes, and of weights that were stored in it.

With `rollout.unquantized = "bf16"` embedding, norms, biases and head are published in bfloat16. A learner that
computes with the rollouts' numbers then rounds them in its forward pass too. The gradient goes straight through
to the float32 master weights.

A checkpoint in bfloat16 leaves every master weight on a number that bfloat16 holds. Adam moves it by lr, and
5e-6 is a fiftieth of the distance to the next one at a weight of 0.05. So all that is rounded to bfloat16 stays
where it is until some twenty steps have added up, while what is quantized otherwise follows at once: behind
rollouts in INT8, a learner in bfloat16 falls back by all that it has learnt. `dither` ends this. A weight that
may lie anywhere between two borders crosses one with a probability that is its step's share of the distance: in
the mean over weights, rounding hides nothing (docs/aligned.md, with measurements).
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.layers.linear import Linear
from areal_q.models.layers.norm import HeadNorm, OffsetNorm


def straight(x: Tensor) -> Tensor:
    """Returns x rounded to bfloat16, in the dtype of x and with the gradient of x. The sum here is exact, since
    the difference is."""
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


class RoundedOffsetNorm(OffsetNorm):
    @property
    def added(self) -> Tensor:
        return straight(self.weight)  # what is published is w


class _Roundable(nn.Module):
    rounds_rest = False
    """True if the module's own parameters are rounded in its forward pass"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.rounds_rest:
            return super().forward(*args, **kwargs)
        masters = self._parameters
        rounded: Any = {n: p if p is None else straight(p) for n, p in masters.items()}
        self._parameters = rounded
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._parameters = masters


@cache
def roundable(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns `kind`, of which nothing else is known, as a class of modules whose own parameters `round_rest`
    rounds."""
    return type(kind.__name__, (_Roundable, kind), {})


_KINDS: dict[type, type] = {
    nn.Embedding: RoundedEmbedding,
    nn.RMSNorm: RoundedNorm,
    HeadNorm: RoundedHeadNorm,
    OffsetNorm: RoundedOffsetNorm,
}
_PLAIN = {rounded: plain for plain, rounded in _KINDS.items()}


def round_rest(model: nn.Module, on: bool = True) -> None:
    """Turns on or off that the forward pass of `model` rounds the tensors that are not quantized. Its
    parameters stay the same objects, so that optimizers still know them; biases that are buffers, which nothing
    trains, are rounded for good."""
    kinds = _KINDS if on else _PLAIN
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]  # changes the forward pass and keeps the state
        elif isinstance(module, Linear | _Roundable):
            module.rounds_rest = on
    if on:
        _round(_biases(model))


@torch.no_grad()
def dither(model: nn.Module, seed: int) -> bool:
    """Gives each number of the trained float32 parameters that bfloat16 holds the digits that rounding to it
    takes: it becomes one of those that round to it, drawn at random. Zeros stay, and so do parameters that are
    no bfloat16 numbers, which lie anywhere already, or one number throughout, which are as they were
    initialized and not as they were rounded. Returns True if there was any to dither. Rounded, the model is bit
    for bit what it was."""
    generator, found = torch.Generator().manual_seed(seed), False
    for parameter in model.parameters():
        if not parameter.requires_grad or parameter.dtype != torch.float32:
            continue
        numbers = parameter.detach().cpu().contiguous()
        bits = numbers.view(torch.int32)  # sign, then magnitude
        if not (bits & 0xFFFF).any() and (bits != bits.flatten()[:1]).any():
            found = True
            digits = torch.empty_like(bits, dtype=torch.int16)
            digits.random_(-0x7FFF, 0x8000, generator=generator).mul_(numbers != 0)
            bits.add_(digits)
            parameter.copy_(numbers)
    return found


def round_frozen(model: nn.Module) -> None:
    """Rounds the float32 parameters and biases that are not trained, in place."""
    _round([*(p for p in model.parameters() if not p.requires_grad), *_biases(model)])


def _biases(model: nn.Module) -> list[Tensor]:
    """Returns the biases that are buffers: those of LoRA's frozen linears, and of routers."""
    return [t for name, t in model.named_buffers() if name.endswith("bias")]


@torch.no_grad()
def _round(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype == torch.float32:
            tensor.copy_(tensor.to(torch.bfloat16))
