"""One learner step, which depends on weights, groups and version history alone, so that a replay can repeat
it."""

import os
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from areal_q.messages import Group
from learner.data.packing import (
    failure_metrics,
    lag_metrics,
    part_metrics,
    response_metrics,
    samples_of,
)
from learner.data.staleness import VersionHistory
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import PolicyUpdater


def train_step(
    updater: PolicyUpdater,
    groups: Sequence[Group],
    history: VersionHistory,
    step: int,
    weights: Sequence[float] = (),
    recorder: TokenRecorder | None = None,
) -> dict[str, float]:
    """Learns from `groups` in step `step`, after which the policy of `updater` has the new weights.

    The order of the groups matters. `weights` are the sampler's, one per group; none means that all are 1.
    `recorder` collects the step's tokens for the token log. Returns the step's metrics by name, in the units of
    docs/metrics.md; none of them depends on time. Raises ConfigError for a response that no micro-batch has
    room for, RecordError if an input of the loss is not finite, and DivergedError after too many gradients in a
    row that were not finite.
    """
    policy = updater.policy
    kl = policy.cfg.reference_kl
    if kl and kl.reset_every and step and step % kl.reset_every == 0:
        updater.reset_reference()
    cfg = policy.cfg
    samples = samples_of(groups, cfg.advantage, history, step, weights, cfg.mask)
    rewards = [s.trajectory.reward for s in samples]
    mean = sum(rewards) / len(rewards)
    values = updater.update(samples, recorder)
    policy.calibrate_kv_scales(samples)
    policy.calibrate_smoothing(samples, step)
    return values | {
        **lag_metrics(samples),
        **part_metrics(samples),
        **failure_metrics(groups),
        **response_metrics(groups),
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
    }


def set_arithmetic(threads: int, device: str) -> None:
    """Sets how this process computes steps: with so many threads, with numbers below float32's smallest normal
    one taken as 0, and on a CPU the same bits each time.

    Processors compute such numbers a hundred times slower, and a very confident policy has many. Without
    torch's deterministic algorithms, several threads add the gradients of a prompt's last token, which predicts
    the first one of each response, in the order in which they happen to come; a GPU lacks some of these
    algorithms. Call it before the process computes anything in parallel: threads take the mode from the one
    that starts them.
    """
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    # torch.use_deterministic_algorithms would import torch's compiler, which takes seconds.
    torch.set_deterministic_debug_mode("warn" if device == "cpu" else "default")
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
