"""The kernels that vLLM uses on a CPU: one for each format, the same on processors with and without AMX.

vLLM itself chooses by processor. With AMX tiles it would use SGL's INT8 product, which refuses float32, and
round the activations of INT4 to eight bits; with AMX-FP8 it would use another FP8 product. A run would then
compute something else on another machine. The choice is therefore made by the environment that vLLM reads
(`VLLM_CPU_ENVIRONMENT`) and by rollout/engines/vllm_backend/worker_cpu.py in its worker.
"""

from typing import Literal, NamedTuple

import torch

from areal_q.errors import ConfigError
from areal_q.kernels.cpu_tile import has

VLLM_CPU_ENVIRONMENT = {
    # OMP_NUM_THREADS sets the number of threads. Bound to cores, they would compete with the learner's there.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_DISABLED_KERNELS": "CPUFP8W8A8ScaledMMLinearKernel",
}


class Kernel(NamedTuple):
    """How vLLM computes a format with activations of some dtype."""

    product: str
    tolerance_nats: float
    """Largest accepted difference between a token's log-prob and that of the format's own arithmetic in
    float32, on the tests' small model alone: about twice the largest seen over 1,280 of its tokens. A deep
    pretrained model amplifies flips: SmolLM2-135M in int8 was 0.2 nats off in the mean and 2.8 at most, as far
    as rounding alone moves it (`areal-q formats`)"""
    why: str
    """The reason for the tolerance"""


_FLIPS = (
    "an activation that lies between two steps of the format may be rounded to either, "
    "and all after it moves"
)
_BFLOAT16 = "activations and the residual stream are rounded to bfloat16 after every operation"

KERNELS: dict[tuple[str, str], Kernel] = {
    ("bf16", "float32"): Kernel("oneDNN float32", 2e-4, "only the order of float32 sums differs"),
    ("bf16", "bfloat16"): Kernel("bfloat16", 0.25, _BFLOAT16),
    ("int8", "float32"): Kernel("oneDNN INT8, exact sums", 0.3, _FLIPS),
    ("int8", "bfloat16"): Kernel("INT8, exact sums", 0.8, f"{_BFLOAT16}; {_FLIPS}"),
    ("int4", "bfloat16"): Kernel("INT4 weights in bfloat16", 0.3, _BFLOAT16),
    ("fp8-channel", "float32"): Kernel("torch._scaled_mm", 0.5, _FLIPS),
    ("fp8-channel", "bfloat16"): Kernel("torch._scaled_mm", 1.5, f"{_BFLOAT16}; {_FLIPS}"),
}
"""Kernels by format and dtype. Other formats are refused on every CPU: vLLM computes FP8 blocks only with AMX,
and then without the format's rounding of activations; NVFP4, MXFP4, INT4-FP8 and weights of eight
bits alone need a GPU; vLLM has no NF4."""

_NEEDS = {"int8": "avx512vnni", "int4": "avx512f"}
"""Instructions without which vLLM's products saturate (INT8), or do not exist (INT4)"""
FORMATS = frozenset(f for f, _ in KERNELS if f not in _NEEDS or has(_NEEDS[f]))
"""Formats that vLLM computes right on this processor"""

OF_EXPERTS = frozenset({"bf16"})
"""Those that vLLM computes a mixture's experts in on every processor; for others it needs AMX."""

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of a head that vLLM's attention on a CPU computes"""


def has_amx() -> bool:
    """Returns True if vLLM would find AMX tiles on this processor."""
    return torch.cpu._is_amx_tile_supported()


def dtype_for(format: str, asked: Literal["auto", "float32", "bfloat16"] = "auto") -> str:
    """Returns the dtype of activations. "auto" means float32 if there is a kernel for it, otherwise bfloat16.
    Raises ConfigError if there is no kernel for the format in the dtype that is asked for."""
    able = [dtype for known, dtype in KERNELS if known == format]
    if asked == "auto":
        return "float32" if "float32" in able else "bfloat16"
    if asked not in able:
        raise ConfigError(
            f"rollout.engine.dtype = {asked!r}: on a CPU vLLM computes rollout.format = {format!r} "
            f"in {' or '.join(able)}"
        )
    return asked


def kernel_for(format: str, asked: Literal["auto", "float32", "bfloat16"] = "auto") -> Kernel:
    """Returns the kernel for `format`. Raises ConfigError as `dtype_for` does."""
    return KERNELS[format, dtype_for(format, asked)]


def check_heads(width: int) -> None:
    """Raises ConfigError unless vLLM's attention computes heads of `width`: its core would die of them."""
    if width not in HEADS:
        able = ", ".join(map(str, HEADS))
        raise ConfigError(f"vLLM's attention on a CPU has no heads of {width}: {able}")
