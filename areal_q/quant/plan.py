"""Which parameters of a decoder a format applies to, and a whole state dict through it and back.

The linears of attention and MLP are quantized; embeddings, norms, the output head and biases
never are (FP8-RL, QaRL: their share of the work is small and their errors reach every token
directly).
"""

import re
from collections.abc import Mapping

from torch import Tensor

from areal_q.errors import QuantizationError
from areal_q.quant.formats import FORMATS

_QUANTIZED = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight$"
)


def is_quantized(name: str) -> bool:
    """Whether parameter `name` of a Hugging Face checkpoint takes the rollout's format."""
    return _QUANTIZED.search(name) is not None


def quantize_state(state: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """The tensors to publish for `state`, under checkpoint names.

    Example: in int8, `X.weight` becomes codes int8 [out, in] and is followed by `X.weight_scale`,
    float32 [out, 1]; every other tensor stays as it is. Raises QuantizationError naming the
    tensor.
    """
    chosen = FORMATS[format]
    published: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_quantized(name):
            prefix = name.removesuffix("weight")
            parts = chosen.quantize(tensor, name)
            published.update({prefix + suffix: parts[suffix] for suffix in chosen.suffixes})
        else:
            published[name] = tensor.detach()
    return published


def dequantize_state(published: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
    """The state that `published` stands for: float32 where it was quantized, else as it is."""
    chosen = FORMATS[format]
    extra = tuple("." + suffix for suffix in chosen.suffixes[1:])
    state: dict[str, Tensor] = {}
    for name, tensor in published.items():
        if is_quantized(name):
            state[name] = chosen.dequantize(
                parts_of(published, name.removesuffix(".weight"), format)
            )
        elif not (extra and name.endswith(extra)):
            state[name] = tensor
    return state


def parts_of(published: Mapping[str, Tensor], prefix: str, format: str) -> dict[str, Tensor]:
    """The parts of linear `prefix`. Raises QuantizationError when one is missing."""
    try:
        return {suffix: published[f"{prefix}.{suffix}"] for suffix in FORMATS[format].suffixes}
    except KeyError as error:
        raise QuantizationError(f"{prefix}: no tensor {error} for format {format}") from error
