"""Quantizing by kernels that read each weight once: numba's on a CPU, Triton's on a GPU.

The formats' torch operations say what is computed; these compute it, to the bit, at the speed of memory.
Each function returns None where there is no kernel for the weight (of another device or dtype, or not
contiguous), and the caller goes on with the torch operations.
"""

import logging
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from areal_q.errors import QuantizationError

logger = logging.getLogger(__name__)

LARGEST = 2.0**127
"""A code times its scale may round to a little more than the range, which must not be infinite."""
TOO_LARGE = f"holds NaN, an infinity or a magnitude above 2^{127}"
_LARGEST_BITS = int(np.float32(LARGEST).view(np.int32))
_NO_RANGES = np.empty((0, 0), np.float32)
_NO_BORDERS = _NO_FACTORS = torch.empty(0)


def eight_bits(
    weight: Tensor,
    name: str,
    dtype: torch.dtype,
    block: tuple[int, int],
    given: Tensor | None = None,
    *,
    factors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(codes [out, in], scales float32 [blocks down, blocks across]).

    weight float32 [out, in], multiplied on the way by `factors` of its columns [in], then of its rows [out],
    float32; `dtype` int8 or float8_e4m3fn; `given`: ranges in the shape of the scales, in place of the measured
    ones. Raises QuantizationError for what is not finite or above LARGEST.
    """
    height, width = block[0], min(block[1], max(1, weight.shape[1]))
    if gpu := _on_gpu(weight):
        if factors:
            weight = (weight * factors[0]).mul_(factors[1][:, None])
        codes, scales, worst = gpu.quantize(weight, dtype, (height, width), given)
        if worst > _LARGEST_BITS:
            raise QuantizationError(f"{name}: {TOO_LARGE}")
        return codes, scales
    kernels = _for(weight)
    if kernels is None:
        return None
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = weight.new_empty((-(-weight.shape[0] // height), -(-weight.shape[1] // width)))
    of_columns, of_rows = factors or (_NO_FACTORS, _NO_FACTORS)
    worst = kernels.quantize(
        weight.numpy(),
        of_rows.contiguous().numpy(),
        of_columns.contiguous().numpy(),
        127.0 if dtype == torch.int8 else 448.0,
        height,
        width,
        _NO_RANGES if given is None else given.contiguous().numpy(),
        codes.view(torch.uint8).numpy(),
        scales.numpy(),
    )
    if worst > _LARGEST_BITS:
        raise QuantizationError(f"{name}: {TOO_LARGE}")
    return codes, scales


def row_blocks(weight: Tensor, width: int) -> Tensor | None:
    """Largest magnitude of every `width` numbers of a row: float32 [out, in] → [out, ⌈in / width⌉]."""
    if gpu := _on_gpu(weight):
        return gpu.ranges(weight, width)
    kernels = _for(weight)
    if kernels is None:
        return None
    out = weight.new_empty((weight.shape[0], -(-weight.shape[1] // width)))
    kernels.ranges(weight.numpy(), width, out.numpy())
    return out


def four_bits(
    weight: Tensor,
    scales: Tensor,
    width: int,
    row_bytes: int,
    *,
    kind: str,
    borders: Tensor = _NO_BORDERS,
) -> Tensor | None:
    """uint8 [out, row_bytes], two codes in a byte: float32 weight [out, in] by scales [out, blocks].

    `kind` is "int4", "e2m1" or "nf4". The last one alone has `borders` between its 16 values, float32 [15] on
    the weight's device, and its first code is in the high half of a byte.
    """
    if gpu := _on_gpu(weight):
        return gpu.nibbles(weight, scales, width, row_bytes, kind, borders.to(weight.device))
    kernels = _for(weight)
    if kernels is None:
        return None
    packed = torch.empty(weight.shape[0], row_bytes, dtype=torch.uint8)
    kernels.nibbles(
        weight.numpy(),
        scales.contiguous().numpy(),
        width,
        borders.numpy(),
        kind == "int4",
        packed.numpy(),
    )
    return packed


def activations(
    x: Tensor, dtype: torch.dtype, width: int, *, least_range: float = 0.0, least_scale: float
) -> tuple[Tensor, Tensor] | None:
    """(codes [T, K], scales float32 [T, ⌈K / width⌉]) of float x [T, K], as of quant/activations, on a GPU."""
    gpu = _on_gpu(x)
    return gpu and gpu.activations(x, dtype, width, least_range, least_scale)


def _for(weight: Tensor) -> ModuleType | None:
    suits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    if not (suits and weight.numel()):
        return None
    from areal_q.kernels.quantize import eight_bits as kernels  # compiles them, if none are cached

    return kernels


def _on_gpu(x: Tensor) -> ModuleType | None:
    suits = x.is_cuda and x.dim() == 2 and x.dtype == torch.float32 and x.is_contiguous()
    return _gpu_kernels() if suits and x.numel() else None


@cache
def _gpu_kernels() -> ModuleType | None:
    try:
        from areal_q.kernels.quantize import gpu_triton
    except ImportError as error:
        logger.warning("quantizing in plain torch, which is slower: %s", error)
        return None
    return gpu_triton
