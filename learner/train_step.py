"""One learner step, a function of weights, groups and history alone: the loop does it, a replay repeats it."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from areal_q.messages import Group
from learner.data.packing import failure_metrics, lag_metrics, part_metrics, samples_of
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
    """Takes step `step` on `groups`, in their order and with their sampler's weights.

    Returns the step's metrics, none of which depends on time. `recorder` keeps what the token log holds.
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
    return values | {
        **lag_metrics(samples),
        **part_metrics(samples),
        **failure_metrics(groups),
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
        "response/tokens_mean": sum(s.trajectory.num_tokens for s in samples) / len(samples),
    }


def machine_name(device: str, backend: str = "torch", *, processor: str | None = None) -> str:
    """Names what the bits of a step depend on besides its inputs: torch, device, processor, threads, ranks.

    `processor` is this machine's by default; "" leaves it out, as records of earlier versions do.
    """
    where = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    if name := _processor() if processor is None else processor:
        where += f", {name}"
    capability = torch.backends.cpu.get_cpu_capability()
    ranks = os.environ.get("WORLD_SIZE", "1")
    several = f", {ranks} ranks" if ranks != "1" else ""
    other = f", {backend}" if backend != "torch" else ""
    threads = f"{torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {where}, {capability}, {threads}{several}{other}"


def _processor() -> str:
    """Returns the processor's name, for kernels are chosen by more than the capability that torch tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
