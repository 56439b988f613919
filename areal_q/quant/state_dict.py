"""The parameters of a decoder that a format applies to, and a whole state dict through it and back.

The linears of attention and MLP are quantized, those of each expert and of shared experts too;
embeddings, norms, the output head, the router of a mixture of experts and biases never are (FP8-RL,
QaRL: their share of the work is small and their errors reach every token directly). A head tied to
the embedding is the embedding, under either name.

Engines fuse q, k and v, and gate and up, into one linear. Scales of blocks, groups and channels simply
stand one after the other there; a scale of the whole tensor (nvfp4) must be one for all of them.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from areal_q.errors import QuantizationError
from areal_q.quant.format import Format, Ranges, check_ranges
from areal_q.quant.linears import is_quantized
from areal_q.quant.registry import FORMATS
from areal_q.quant.rescaling import Fold

SMOOTHING = "smoothing"
"""What follows a linear's name for the s by which it divides its input, float32 [in] (smoothing.py)"""
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
}


class RangePolicy(Protocol):
    def __call__(self, name: str, ranges: Ranges) -> Ranges:
        """Returns the ranges to use for parameter `name`, given the measured ones."""
        ...


def fused_name(name: str) -> str:
    """Returns the linear of an engine that parameter `name` becomes a part of.

    Example: `model.layers.0.self_attn.k_proj.weight` is part of `model.layers.0.self_attn.qkv_proj`.
    """
    parent, _, child = name.removesuffix(".weight").rpartition(".")
    return f"{parent}.{_FUSED.get(child, child)}"


def quantize_state(
    state: Mapping[str, Tensor],
    format: str,
    policy: RangePolicy | None = None,
    folds: Mapping[str, Fold] | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors to publish for `state` times `folds`, under checkpoint names.

    Example: in int8, `X.weight` becomes codes int8 [out, in] and is followed by `X.weight_scale`,
    float32 [out, 1]; every other tensor stays as it is. Raises QuantizationError naming the
    tensor.
    """
    chosen = FORMATS[format]
    folds = folds or {}
    ranges = _ranges(state, chosen, policy, folds)
    published: dict[str, Tensor] = {}
    for name, tensor in state.items():
        fold = folds.get(name)
        if is_quantized(name):
            parts = chosen.quantize(tensor, name, ranges.get(name), fold)
            prefix = name.removesuffix("weight")
            published.update({prefix + suffix: parts[suffix] for suffix in chosen.suffixes})
            if fold and fold.at_input and fold.columns is not None:
                published[prefix + SMOOTHING] = fold.columns
        else:
            published[name] = fold.of(tensor) if fold else tensor.detach()
    return published


def rest_in_bf16(published: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """Returns `published` with the float32 tensors that are no part of a quantized weight rounded to
    bfloat16."""

    def rest(name: str, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float32 and _split(name, FORMATS[format])[1] is None

    return {n: t.to(torch.bfloat16) if rest(n, t) else t for n, t in published.items()}


def dequantize_state(published: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """Returns the state that `published` stands for: float32 where it was quantized, else as it is."""
    chosen = FORMATS[format]
    state: dict[str, Tensor] = {}
    for name, tensor in published.items():
        linear, suffix = _split(name, chosen)
        if suffix is None:
            state[name] = tensor
        elif suffix == chosen.suffixes[0]:
            weight = chosen.dequantize(parts_of(published, linear, format))
            s = published.get(f"{linear}.{SMOOTHING}")
            state[f"{linear}.weight"] = weight if s is None else weight / s
    return state


def parts_of(published: Mapping[str, Tensor], prefix: str, format: str) -> dict[str, Tensor]:
    """Returns the parts of linear `prefix`. Raises QuantizationError when one is missing."""
    try:
        return {suffix: published[f"{prefix}.{suffix}"] for suffix in FORMATS[format].suffixes}
    except KeyError as error:
        raise QuantizationError(f"{prefix}: no tensor {error} for format {format}") from error


def check_shapes(
    published: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], format: str
) -> None:
    """Raises QuantizationError, which names the tensor, unless `published` has every parameter of `shapes` in
    its shape, and a linear's s, if there is one, in float32 for each of its inputs. What else is published does
    not matter."""
    for name, shape in shapes.items():
        if is_quantized(name):
            linear = name.removesuffix(".weight")
            fits = _fits(parts_of(published, linear, format), shape, format)
            s = published.get(f"{linear}.{SMOOTHING}")
            if s is not None and (s.dtype, *s.shape) != (torch.float32, shape[-1]):
                raise QuantizationError(f"{linear}.{SMOOTHING} is not float32 [{shape[-1]}]")
        else:
            fits = name in published and published[name].shape == shape
        if not fits:
            raise QuantizationError(f"{name} is missing, or has another shape than {list(shape)}")


def _fits(parts: Mapping[str, Tensor], shape: tuple[int, ...], format: str) -> bool:
    """Returns whether `parts` are those of a weight of this shape."""
    codes = parts[FORMATS[format].suffixes[0]]
    # A shape that is claimed takes no more memory than what was published.
    if 8 * codes.nbytes < math.prod(shape) * FORMATS[format].code_bits:
        return False
    found = {suffix: (part.dtype, tuple(part.shape)) for suffix, part in parts.items()}
    return found == _layout(shape, format)


@lru_cache(1024)
def _layout(shape: tuple[int, ...], format: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns dtype and shape of the parts that `format` makes of a weight of this shape."""
    parts = FORMATS[format].quantize(torch.zeros(shape), "zeros")
    return {suffix: (part.dtype, tuple(part.shape)) for suffix, part in parts.items()}


def codes_of(published: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """Returns the codes of every quantized parameter, by the parameter's name."""
    chosen = FORMATS[format]
    found = {name: _split(name, chosen) for name in published}
    return {
        f"{linear}.weight": published[name]
        for name, (linear, suffix) in found.items()
        if suffix == chosen.suffixes[0]
    }


def _split(name: str, format: Format) -> tuple[str, str | None]:
    """(linear, suffix) of a published tensor; None for one that is no part of a quantized linear."""
    for suffix in (*format.suffixes, SMOOTHING):
        linear = name.removesuffix("." + suffix)
        if linear != name and is_quantized(f"{linear}.weight"):
            return linear, suffix
    return name, None


def _ranges(
    state: Mapping[str, Tensor],
    format: Format,
    policy: RangePolicy | None,
    folds: Mapping[str, Fold],
) -> dict[str, Ranges]:
    """Ranges by parameter, where they are not simply those that the format measures itself."""
    if policy is None and not format.shared_scale:
        return {}
    found: dict[str, Ranges] = {}
    for name, tensor in state.items():
        if not is_quantized(name):
            continue
        measured = format.ranges(folds[name].of(tensor) if name in folds else tensor)
        if measured is not None:
            check_ranges(measured, name)  # before the policy, which remembers them
            found[name] = measured
    if format.shared_scale:
        top: dict[str, Tensor] = {}
        for name, r in found.items():
            key = fused_name(name)
            top[key] = torch.maximum(top[key], r.whole) if key in top else r.whole
        found = {name: Ranges(r.blocks, top[fused_name(name)]) for name, r in found.items()}
    return found if policy is None else {name: policy(name, r) for name, r in found.items()}
