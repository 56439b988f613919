"""An FP8 KV cache: keys and values in E4M3, a scale for those of each layer (FP8-RL).

    code = E4M3(x / scale), saturating;    scale = range · margin / 448    float32, per layer, for q, k and v

The range is the largest magnitude, or a percentile of them, that was seen: of keys after RoPE, as they are
cached. A scale that is too large by some factor costs nothing until codes become subnormal, 2¹⁵ times below
the range; one that is too small saturates. So margins are wide. Scales are measured anew for each version of
the weights, by the engine (rollout/engines/reference/kv_cache_fp8.py), or by the learner, which publishes them
with the weights as `….self_attn.q_scale`, `k_scale` and `v_scale`, float32 [1]: the names of
compressed-tensors. q's is for engines that multiply in FP8.

Error bound. |x - code · scale| ≤ max(2⁻⁴ |code|, 2⁻¹⁰) · scale for |x| ≤ 448 scale, as in `fp8_block.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_q.quant.activations import E4M3_MAX, SMALLEST_SCALE, to_e4m3

NAMES = ("q_scale", "k_scale", "v_scale")


def scale_for(magnitude: Tensor, margin: float) -> Tensor:
    """float32 scale under which `magnitude` times `margin` is the largest code."""
    largest = torch.full((), E4M3_MAX, device=magnitude.device)  # see activations.py
    return (magnitude.float() * margin / largest).clamp(min=SMALLEST_SCALE)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn codes of x; `scale` broadcasts against it. NaN stays NaN."""
    return to_e4m3(x / scale)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """float32."""
    return codes.to(torch.float32) * scale


def name_of(layer: int, which: str) -> str:
    """Example: name_of(0, "k_scale") is "model.layers.0.self_attn.k_scale"."""
    return f"model.layers.{layer}.self_attn.{which}"


def kv_scales_of(tensors: Mapping[str, Tensor], layers: int) -> Tensor | None:
    """Returns the published scales of keys and values, float32 [layers, 2]; None where there are none.

    Raises KeyError naming one that is missing among others.
    """
    if name_of(0, "k_scale") not in tensors:
        return None
    rows = [[tensors[name_of(i, which)].reshape(()) for which in NAMES[1:]] for i in range(layers)]
    return torch.stack([torch.stack(row) for row in rows]).float()
