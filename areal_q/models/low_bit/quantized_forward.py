"""The learner's forward pass on the same quantized numbers as the rollouts (QaRL).

    weights θ ──quantize_state──▶ parts ──┬──▶ linear_of ──────▶ the forward of π_prox and π_θ
                                          └──▶ published_state ──▶ the version that engines run

`QuantLinear` runs the format's own linear layer, with activations quantized as in the engine, on codes and
scales (the parts) that `materialise` computes once for each state of the weights. The same tensors are
published, so that nothing is quantized twice. The backward pass is that of the full-precision layer (a
straight-through estimator),

    y = Q(x) · Q(W)ᵀ + b,    ∂x = ∂y · W,    ∂W = ∂yᵀ · x,    ∂b = Σ ∂y

with the master weights W, which are the only ones that the optimizer knows.

Where what is published is smoothed (areal_q/quant/smoothing.py), the parts are those of W with its rows times r
and its columns times c, and the norm or the linear before gives engines x / c. The learner's own gives x, so

    y = (Q(x / c) · Q(r W c)ᵀ + r b) / r

Both are powers of two, so that every number is the engine's to the bit, times a power of two.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from areal_q.linear.quantized_linear import Linear as Product
from areal_q.linear.registry import linear_of
from areal_q.models.layers.linear import Linear
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.quant.format import Parts
from areal_q.quant.registry import FORMATS
from areal_q.quant.rescaling import Fold
from areal_q.quant.state_dict import is_quantized, parts_of, quantize_state


class Unfolded:
    """The product with a weight that was multiplied by `fold`, for what comes and goes without it."""

    def __init__(self, product: Product, fold: Fold) -> None:
        self._product, self._fold = product, fold

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        columns, rows = self._fold.columns, self._fold.rows
        x = x if columns is None else x / columns
        if rows is None:
            return self._product(x, add)
        return self._product(x, add if add is None else add * rows) / rows


class QuantLinear(Linear):
    """A linear layer whose forward pass runs on quantized weights; `weight` is the master copy. It can run only
    after the first `materialise`."""

    format: str
    parts: Parts
    product: Product
    fold: Fold | None = None
    """What the weight is multiplied by before it is quantized, as in what is published."""

    def take(self, parts: Parts) -> None:
        """Uses `parts`, the codes and scales of the changed weights, from now on."""
        product = linear_of(FORMATS[self.format], [parts])
        self.parts, self.product = parts, Unfolded(product, self.fold) if self.fold else product

    @property
    def acting_bias(self) -> Tensor | None:
        return straight(self.bias) if self.rounds_rest and self.bias is not None else self.bias

    def forward(self, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2)  # transformers' own layers hand over padded rows
        out = straight_through(rows, self.weight, self.acting_bias, self.product)
        return out.unflatten(0, input.shape[:-1])


def as_engines_compute(kind: str) -> AbstractContextManager[object]:
    """Returns a context for products on published numbers, on device type `kind`. On a CPU they are in float32,
    equal to the bit; on a GPU in bfloat16 if the learner computes in it, as in vLLM and SGLang, since float32
    products are many times slower there."""
    return torch.autocast(kind, enabled=False) if kind == "cpu" else nullcontext()


def straight_through(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Returns `product(x, bias)`, with the gradients of x · weightᵀ + bias."""
    return _StraightThrough.apply(x, weight, bias, product)  # type: ignore[return-value]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Any:
        ctx.save_for_backward(x, weight)
        kind = x.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with as_engines_compute(kind):
            return product(x.float(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        needed = ctx.needs_input_grad
        with torch.autocast(*ctx.autocast):
            return (
                grad @ weight if needed[0] else None,
                grad.t() @ x if needed[1] else None,
                grad.sum(0) if needed[2] else None,
                None,
            )


def linears(model: nn.Module) -> dict[str, Linear]:
    """Returns the linear layers of `model` that a format applies to, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and is_quantized(f"{name}.weight")
    }


def use(kind: type[Linear], model: nn.Module, format: str) -> None:
    """Changes the linear layers of `model` that a format applies to into ones of class `kind`, with the same
    parameters. If the class is quantized, they are materialised in `format`, ready to run."""
    for name, linear in linears(model).items():
        with torch.device("meta"):
            new = kind(linear.in_features, linear.out_features, linear.bias is not None)
        new.weight, new.bias = linear.weight, linear.bias
        new.rounds_rest = linear.rounds_rest
        if isinstance(new, QuantLinear):
            new.format = format
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
    materialise(model)


@torch.no_grad()
def materialise(model: nn.Module) -> None:
    """Quantizes the weights for the forward pass. Call it whenever they have changed. The weights of a sharded
    model are gathered, and every rank quantizes them for itself.

    Raises QuantizationError, which names the tensor, for one that is not finite.
    """
    found = {n: m for n, m in linears(model).items() if isinstance(m, QuantLinear)}
    if not found or any(m.weight.is_meta for m in found.values()):  # a shard that is not filled yet
        return
    format = next(iter(found.values())).format
    # Layers are gathered one by one, so that no more than one is complete in memory.
    for _, names in groupby(found, key=_layer_of):
        layer = {name: found[name] for name in names}
        weights = {f"{n}.weight": _whole(m.weight) for n, m in layer.items()}
        folds = {f"{n}.weight": m.fold for n, m in layer.items() if m.fold}
        published = quantize_state(weights, format, folds=folds)
        for name, linear in layer.items():
            linear.take(parts_of(published, name, format))


def _layer_of(name: str) -> str:
    """Returns the number of the layer that the linear `name` is in; "" if it is in none."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def fold(model: nn.Module, folds: Mapping[str, Fold]) -> None:
    """Makes the quantized linears of `model` run on weights that are multiplied by `folds`, by the parameters'
    names; the function stays the same."""
    for name, linear in linears(model).items():
        if isinstance(linear, QuantLinear):
            linear.fold = folds.get(f"{name}.weight")
    materialise(model)


def _whole(weight: Tensor) -> Tensor:
    # An isinstance test would need the import of DTensor, which takes a second.
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[operator]
