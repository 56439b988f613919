"""Our learner's steps on the batch of bench/shapes/learner.py: `python -m bench.learner.step SPEC.json`.

Prints one JSON line: CPU seconds and gradient norm of each step, the CPU seconds of a version made after
them, and this process's memory.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_q.config import Run, load
from areal_q.models import load_decoder
from areal_q.system.processes import keep_freed_memory
from bench.learner.memory import resident_bytes
from bench.records import make_trajectory
from learner.backends.single_device import TorchPolicy
from learner.data.packing import Sample
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder


def measured(spec: dict[str, Any]) -> dict[str, Any]:
    run = load(
        None,
        [
            "learner.objective.type=ppo", "learner.minibatches=1", f"learner.optimizer.lr={spec['lr']}",
            f"learner.microbatch_tokens={spec['tokens']}", "learner.optimizer.warmup_steps=0",
            "learner.optimizer.betas=[0.9,0.999]", f"learner.dtype={spec['dtype']}",
        ],
    )  # fmt: skip
    import_module("areal_q.models.fused.trunk")  # with its libraries, as peers have theirs by now
    import_module("areal_q.models.fused.head")
    start = resident_bytes()
    policy = TorchPolicy(load_decoder(spec["model"]), run.learner, temperature=1.0)
    samples = samples_of(spec["groups"])
    seconds, norms = [], []
    for _ in range(spec["steps"]):
        began = time.process_time()
        norms.append(update_policy(policy, samples)["train/grad_norm"])
        seconds.append(time.process_time() - began)
    found = {"seconds": seconds, "norms": norms, "start": start, "peak": resident_bytes(peak=True)}
    return found | {"version_s": version_seconds(run, policy)}


def version_seconds(run: Run, policy: TorchPolicy) -> float:
    """Returns the CPU seconds in which a version is made, when it is not the first."""
    builder, seconds = VersionBuilder(run), 0.0
    for version in range(2):
        began = time.process_time()
        builder.build(policy.model, version)
        seconds = time.process_time() - began
    return seconds


def samples_of(groups: list[dict[str, Any]]) -> list[Sample]:
    out = []
    for ticket, group in enumerate(groups):
        rewards = torch.tensor(group["rewards"])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for i, ids in enumerate(group["responses"]):
            t = make_trajectory(i, ids, -9.0, reward=float(rewards[i]))
            lag, prompt = np.zeros(len(ids), np.int64), np.array(group["prompt_ids"], np.int32)
            out.append(Sample(ticket, prompt, t, float(advantages[i]), lag))
    return out


if __name__ == "__main__":
    keep_freed_memory()  # as a learner does
    torch.set_num_threads(1)
    print(json.dumps(measured(json.loads(Path(sys.argv[1]).read_text()))))
