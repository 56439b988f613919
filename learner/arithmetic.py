"""How a process computes the steps of a learner, and what their rounding depends on."""

import os
import platform
from functools import cache
from pathlib import Path

import torch


def set_arithmetic(threads: int, device: str) -> None:
    """Sets how this process computes steps: with so many threads, with numbers below float32's smallest normal
    one taken as 0, and with the same bits each time.

    Processors compute such numbers a hundred times slower, and a very confident policy has many. Without
    torch's deterministic algorithms, threads of a CPU or GPU add the gradients of a token that occurs several
    times, and those of a prompt's last token, which predicts the first one of each response, in the order in
    which they happen to come. Torch warns once of what it has no such algorithm for; cuDNN's attention, which
    has none, is not used. Call it before the process computes anything: threads take the mode from the one that
    starts them, and cuBLAS reads its variable once.
    """
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    # torch.use_deterministic_algorithms would import torch's compiler, which takes seconds.
    torch.set_deterministic_debug_mode("warn")
    # All that is read was written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def machine_name(device: str, backend: str = "torch", *, threads: int | None = None) -> str:
    """Returns what a step's rounding depends on, as text: torch, device, processor, threads, ranks, backend.

    `threads` are torch's at present by default.
    """
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    if name := _processor():
        where += f", {name}"
    capability = torch.backends.cpu.get_cpu_capability()
    ranks = os.environ.get("WORLD_SIZE", "1")
    several = f", {ranks} ranks" if ranks != "1" else ""
    other = f", {backend}" if backend != "torch" else ""
    count = torch.get_num_threads() if threads is None else threads
    return f"torch {torch.__version__}, {where}, {capability}, {count} threads{several}{other}"


@cache
def _processor() -> str:
    """Returns the processor's name, as libraries choose kernels by more than torch's CPU capability."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
