"""What devices can do: published figures of GPUs, a measurement of this machine's processor, or one's own.

Rates are of dense products with float32 sums, without sparsity, as the makers' data sheets give them:

| device | source |
|---|---|
| h100, h100-pcie, h200 | NVIDIA H100 and H200 Tensor Core GPU data sheets (SXM5 but for -pcie) |
| b200 | NVIDIA HGX B200 data sheet, a GPU's eighth of it |
| a100, a100-40 | NVIDIA A100 Tensor Core GPU data sheet (SXM4) |
| l40s, l4, a10 | NVIDIA L40S, L4 and A10 data sheets |
| 4090 | NVIDIA Ada GPU architecture white paper |

What share of a rate a learner or an engine reaches is in SHARES and areal_q/plan/worker_speed.py.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_q.checks.automatic import cpu_flags
from areal_q.checks.memory import available_bytes
from areal_q.config import Run, TorchEngine
from areal_q.decode_errors import suggestion
from areal_q.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One GPU, or the whole of a machine's processor."""

    name: str
    float32: float
    """FLOP/s of float32; of a processor, of one thread."""
    bfloat16: float
    """FLOP/s of bfloat16, likewise."""
    eight_bits: float
    """Operations a second of int8 or fp8, likewise; where there are none, as bfloat16."""
    bandwidth: float
    """Bytes a second from its memory."""
    memory: float
    """Bytes; of a machine, those that are free."""
    shares: dict[str, float]
    """The part of its products' rate that a learner's whole step reaches, by the dtype."""
    cores: int = 0
    """Threads that run at the same time; 0: a GPU."""


GPU_SHARES = {"bfloat16": 0.25, "float32": 0.5}
"""Shares of the published rates: a step of Qwen2.5-0.5B's shape on an H100; larger models reach more."""
CPU_SHARES = {"bfloat16": 0.7, "float32": 0.74}
"""Shares of a large product's rate: steps of 20M, 135M and 0.5B parameters came to 0.67 to 0.77"""


def _gpu(name: str, tf32: float, bf16: float, low: float, gb_s: float, gb: float) -> Device:
    return Device(name, tf32 * 1e12, bf16 * 1e12, low * 1e12, gb_s * 1e9, gb * 1e9, GPU_SHARES)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 67, 989, 1979, 3350, 80),
        _gpu("h100-pcie", 51, 756, 1513, 2000, 80),
        _gpu("h200", 67, 989, 1979, 4800, 141),
        _gpu("b200", 75, 2250, 4500, 8000, 180),
        _gpu("a100", 19.5, 312, 624, 2039, 80),
        _gpu("a100-40", 19.5, 312, 624, 1555, 40),
        _gpu("l40s", 91.6, 362, 733, 864, 48),
        _gpu("l4", 30.3, 121, 242, 300, 24),
        _gpu("a10", 31.2, 125, 250, 600, 24),
        _gpu("4090", 82.6, 165, 330, 1008, 24),
    )
}
"""TFLOP/s of float32, bfloat16 and eight bits, GB/s, GB"""


MOST_GPUS = 1024
"""Every split of so many is tried, which takes a second or two"""


@dataclass(frozen=True)
class Hardware:
    device: Device
    count: int
    """GPUs in all, for learner and workers; 1 for a processor."""

    @property
    def is_cpu(self) -> bool:
        return self.device.cores > 0

    def __str__(self) -> str:
        if self.is_cpu:
            return f"{self.device.cores} cores, {self.device.float32 / 1e9:.0f} GFLOP/s of float32 each"
        return f"{self.count} × {self.device.name}"


def on_gpus(run: Run, learner: bool, workers: bool) -> Run:
    """Returns `run` with its learner, or an engine of ours, on a GPU where the settings have the CPU."""
    cfg, rollout = run.learner, run.rollout
    if learner and cfg.device == "cpu":
        cfg = msgspec.structs.replace(cfg, device="cuda")
    if workers and isinstance(rollout.engine, TorchEngine) and rollout.engine.device == "cpu":
        engine = msgspec.structs.replace(rollout.engine, device="cuda")
        rollout = msgspec.structs.replace(rollout, engine=engine)
    return msgspec.structs.replace(run, learner=cfg, rollout=rollout)


def hardware(text: str, tflops: float, gb_s: float, gb: float) -> Hardware:
    """Returns what `text` names: "cpu", "h100" or "h100:8", with one's own figures where they are not 0; a name
    that is not known needs all three. Raises ConfigError."""
    name, _, count = text.lower().partition(":")
    if count and not (count.isdecimal() and 0 < int(count) <= MOST_GPUS):
        most = f"; COUNT is at most {MOST_GPUS:,}" if count.isdecimal() else ""
        raise ConfigError(f"--gpu {text}: not NAME or NAME:COUNT, such as h100:8{most}")
    own = tflops and gb_s and gb
    if name == "cpu":
        found = processor(tflops)
    elif name in GPUS or own:
        found = GPUS.get(name) or _gpu(name, 0, 0, 0, 0, 0)
    else:
        known = suggestion(name, list(GPUS)) or f"known are cpu, {', '.join(GPUS)}."
        raise ConfigError(
            f"--gpu {text}: {known} For another one give --tflops, --gb-s and --gb as well"
        )
    rate = tflops * 1e12
    return Hardware(
        Device(
            found.name,
            found.float32 or rate / 8,
            rate or found.bfloat16,
            2 * rate or found.eight_bits,
            gb_s * 1e9 or found.bandwidth,
            gb * 1e9 or found.memory,
            found.shares,
            found.cores,
        ),
        int(count or 1),
    )


def processor(tflops: float = 0) -> Device:
    """Returns this machine's processor as it multiplies now, in one thread: half a second of products, and of a
    copy. With `tflops` nothing is measured but the copy."""
    import torch

    torch.set_num_threads(1)
    flags = cpu_flags()
    low = bool(flags & {"avx512_bf16", "amx_bf16"})
    int8 = bool(flags & {"avx512_vnni", "avx_vnni"})
    x, w = torch.randn(512, 1024), torch.randn(1024, 1024)
    rate = tflops * 1e12 or _product_rate(x, w)
    bf16 = _product_rate(x.bfloat16(), w.bfloat16()) if low and not tflops else rate
    source = torch.ones(32 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = 2 * len(source) / best_seconds(lambda: target.copy_(source))
    cores = os.cpu_count() or 1
    free = float(available_bytes() or 0)
    return Device("cpu", rate, bf16, 2 * bf16 if int8 else bf16, copied, free, CPU_SHARES, cores)


def _product_rate(x: Any, w: Any) -> float:
    from areal_q.models.layers.linear import product

    return 2 * x.numel() * len(w) / best_seconds(lambda: product(x, w))


def best_seconds(run: Callable[[], object]) -> float:
    """Returns the CPU seconds of `run`, so that other programs count less than by the clock."""
    run()
    best = float("inf")
    for _ in range(5):
        began, count = time.process_time(), 0
        while time.process_time() - began < 0.02:
            run()
            count += 1
        best = min(best, (time.process_time() - began) / count)
    return best
