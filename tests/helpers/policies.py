"""Policies as the learner builds them, and their tensors as bytes."""

import torch

from areal_q.config import Run
from areal_q.tasks import build_tokenizer
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build import build_model


def build_policy(run: Run) -> TorchPolicy:
    """Returns the policy of `run` at its beginning, for rollouts at temperature 1."""
    model = build_model(run, build_tokenizer(run))
    set_precision(model, run)
    return TorchPolicy(model, run.learner, 1.0)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 [nbytes], to compare bit for bit."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
