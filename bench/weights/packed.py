"""A version of weights as a learner publishes it, for what only wants something to run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from areal_q.quant import quantize_state
from areal_q.weights.version import WeightVersion, pack_version


def packed(state: Mapping[str, Tensor], format: str, model: dict[str, Any]) -> WeightVersion:
    """Version 0 of `state`, under checkpoint names, quantized; `model` is Hugging Face's config."""
    return pack_version(
        quantize_state(state, format), run="bench", epoch="0", version=0, format=format,
        uaq_scale=1.0, model=model, published_s=0.0,
    )  # fmt: skip
