"""Dynamic quantization of activations: what the W8A8 formats do to x [T, K] before a GEMM.

Per token, or per group of 128 channels of a token; scales are float32 and never stored. The same
formulas as for weights. The floors under the FP8 scales, which define rows of zeros, are those of
vLLM's kernels: per token 1 / (448 · 512), per group a largest magnitude of 1e-10. A row that holds NaN
or an infinity comes out as NaN, which the engine refuses (rollout/engines).
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from areal_q.kernels.quantize import dispatch

INT8_MAX = 127
E4M3_MAX = 448.0
GROUP = 128
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A scale of zero would divide zeros by zero, and a subnormal one has hardly any precision."""
SMALLEST_ROW_SCALE = 1 / (E4M3_MAX * 512)
SMALLEST_GROUP_RANGE = 1e-10
# As tensors, and `on` the same device: CUDA divides by a number, or by a CPU's scalar, as a product with its
# reciprocal, whose bits are others; and a CPU would convert a number at every call.
_INT8_MAX, _E4M3_MAX = torch.tensor(float(INT8_MAX)), torch.tensor(E4M3_MAX)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per row, as in `int8.py`: (codes int8 [T, K], scale float32 [T, 1])."""
    fast = dispatch.activations(x, torch.int8, x.shape[1], least_scale=SMALLEST_SCALE)
    if fast is not None:
        return fast
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.div_(on(_INT8_MAX, x.device)).clamp_(min=SMALLEST_SCALE)
    return (x / scale).round_().to(torch.int8), scale


def quantize_rows_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 per row, as in `fp8_channel.py`: (codes float8_e4m3fn [T, K], scale float32 [T, 1])."""
    fast = dispatch.activations(x, torch.float8_e4m3fn, x.shape[1], least_scale=SMALLEST_ROW_SCALE)
    if fast is not None:
        return fast
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.div_(on(_E4M3_MAX, x.device)).clamp_(min=SMALLEST_ROW_SCALE)
    return to_e4m3(x / scale), scale


def quantize_groups_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 per 128 channels of a row: (codes float8_e4m3fn [T, K], scale float32 [T, ⌈K/128⌉])."""
    fast = dispatch.activations(
        x, torch.float8_e4m3fn, GROUP, least_range=SMALLEST_GROUP_RANGE, least_scale=SMALLEST_SCALE
    )
    if fast is not None:
        return fast
    rest = -x.shape[1] % GROUP
    groups = torch.nn.functional.pad(x, (0, rest)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True).clamp_(min=SMALLEST_GROUP_RANGE)
    scale = largest.div_(on(_E4M3_MAX, x.device))
    return to_e4m3(groups / scale).flatten(1)[:, : x.shape[1]], scale.squeeze(-1)


def dequantize_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [T, K] of codes [T, K] with a scale [T, ⌈K/128⌉] per 128 channels."""
    per_channel = scale.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]
    return codes.to(torch.float32).mul_(per_channel)


def expanded(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales of 128×128 blocks [⌈out/128⌉, ⌈in/128⌉] → [out, in]."""
    out_features, in_features = shape
    rows = scale.repeat_interleave(GROUP, 0)[:out_features]
    return rows.repeat_interleave(GROUP, 1)[:, :in_features]


@cache
def on(constant: Tensor, device: torch.device) -> Tensor:
    """Returns a module's `constant`, copied to `device` once: the host waits for each copy."""
    with torch.inference_mode(False):
        return constant.to(device)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 number, ties to even; beyond ±448 it saturates. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
