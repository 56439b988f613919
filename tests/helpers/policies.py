"""Policies as the learner builds them, their checkpoints, and their tensors as bytes."""

from pathlib import Path

import torch

from areal_q.config import Run
from areal_q.tasks import build_tokenizer
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build import build_model


def build_policy(run: Run, temperature: float = 1.0) -> TorchPolicy:
    """Returns the policy of `run` at its beginning, for rollouts at `temperature`."""
    model = build_model(run, build_tokenizer(run))
    set_precision(model, run)
    return TorchPolicy(model, run.learner, temperature)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 [nbytes], to compare bit for bit."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def save_at(step: int, directory: Path, policy: TorchPolicy, keep: int = 1) -> None:
    """Saves a checkpoint of a policy that is part of no run: nothing is admitted, nothing published."""
    state = checkpoint.State(
        step=step, position="0-1", cursor=1, outstanding=[], digests={},
        updates=policy.updates, skipped=policy.skipped,
    )  # fmt: skip
    checkpoint.save(directory, state, policy, keep)
