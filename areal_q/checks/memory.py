"""An estimate of the memory that a run's processes take, beside what the machine has."""

import math
from collections.abc import Iterator
from pathlib import Path

from areal_q.checks.disk_use import format_bytes
from areal_q.checks.machine import CheckResult
from areal_q.config import PretrainedModel, Run, ScriptedEngine
from areal_q.models import DecoderConfig
from areal_q.observability.run_summary import plural
from areal_q.quant import is_quantized
from areal_q.system.disk import size

PROCESS_BYTES = 700 << 20
"""Python, torch and compiled kernels of a process, without a model"""
TRAINED_BYTES = 24
"""Bytes of the learner for a weight that it trains: the weight, its gradient and two moments in float32, and as
much as two more while a version is published and a checkpoint is written"""
FROZEN_BYTES = 12
"""Bytes for a weight under adapters, or of a reference: float32, and twice more while it is read and written"""
VERSIONS = 3
"""Versions of the weights that a worker holds as they were published: in use, received, and the next"""
LAID_OUT_BYTES = 8
"""Bytes of a worker for a weight as its kernels take it: float32 at most, in the version in use and the next"""
KV_ITEM_BYTES = {"auto": 4, "fp8": 1}
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Returns how many bytes can still be taken; None where the system does not say so in Linux's way."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in table:
        return None
    free = int(table["MemAvailable"].split()[0]) << 10
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        taken = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return free
    return free if most == "max" else min(free, int(most) - taken)


def learner_bytes(run: Run, shape: DecoderConfig) -> int:
    """Returns about how much the learner takes, all its ranks on this machine together."""
    each = FROZEN_BYTES if run.learner.lora else TRAINED_BYTES
    kl = run.learner.reference_kl
    return PROCESS_BYTES + shape.weights * (each + 4 * bool(kl and kl.path))


def worker_bytes(run: Run, shape: DecoderConfig, prompt: int) -> int:
    """Returns about how much one worker takes, with prompts of `prompt` tokens."""
    rollout, engine = run.rollout, run.rollout.engine
    if isinstance(engine, ScriptedEngine):
        return PROCESS_BYTES
    rest = 2 if rollout.unquantized == "bf16" else 4
    linears = format_bytes(rollout.format)
    payload = sum(
        math.prod(size) * (linears if is_quantized(name) else rest)
        for name, size in shape.tensors().items()
    )
    held = VERSIONS * payload + LAID_OUT_BYTES * shape.weights
    kv_item = KV_ITEM_BYTES[getattr(engine, "kv_cache", "auto")]
    position = 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_item
    outstanding = run.learner.max_outstanding * run.learner.group_size
    cached = min(engine.slots, outstanding) * (prompt + rollout.tokens_after_prompt)
    return PROCESS_BYTES + int(held) + position * cached


def memory_of(run: Run, shape: DecoderConfig, prompt: int) -> Iterator[CheckResult]:
    """Yields what a run of a pretrained model takes of this machine's memory; nothing for the small one."""
    free = available_bytes()
    if not isinstance(run.model, PretrainedModel) or free is None:
        return
    learner = learner_bytes(run, shape) if run.learner.device == "cpu" else PROCESS_BYTES
    worker, workers = worker_bytes(run, shape, prompt), run.rollout.workers
    says = (
        f"about {size(learner)} for the learner, {size(worker)} for each of {plural(workers, 'worker')}; "
        f"{size(free)} available"
    )
    if learner + workers * worker <= free:
        yield CheckResult("memory", "ok", says)
    else:
        fix = "a smaller model, learner.lora, fewer workers, or what else runs here ended"
        yield CheckResult("memory", "warning", says, fix)
