"""Objectives and advantages that are functions of the user's own (areal_q/plugins.py), and their checks."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor

from areal_q.algorithms.loss_types import LossInputs, PolicyLoss
from areal_q.algorithms.ratios import Ratios, ratios
from areal_q.config.objectives import (
    AdvantageConfig,
    ObjectiveConfig,
    PythonAdvantage,
    PythonObjective,
    parts_of,
)
from areal_q.errors import TaskError
from areal_q.plugins import load_function, place_of, user_code

_load = cache(lambda path, digest, default: load_function(path, default))
"""The function of these, loaded once for each digest of its files."""


def objective(x: Ratios, cfg: PythonObjective) -> PolicyLoss:
    """Returns what the user's function makes of `x`: J of each token, or a PolicyLoss with that and what became
    of the tokens. Raises TaskError, with the user's line, if it raises or gives something else."""
    function = _load(cfg.path, cfg.digest, "objective")
    with user_code(cfg.path, function=function):
        given = function(x, **cfg.settings)
    out = given if isinstance(given, PolicyLoss) else PolicyLoss(given)
    for field in fields(out):
        values = getattr(out, field.name)
        # J itself is None where a return was forgotten.
        if field.name == "objective" or values is not None:
            _check(values, x.mask, function)
    return out


def advantage(rewards: Tensor, group_ids: Tensor, cfg: PythonAdvantage) -> Tensor:
    """Returns the advantages [N] that the user's function makes of the rewards, in their dtype. Raises
    TaskError as `objective` does, and for one that is not finite."""
    function = _load(cfg.path, cfg.digest, "advantage")
    with user_code(cfg.path, function=function):
        given = function(rewards, group_ids, **cfg.settings)
    _check(given, rewards, function)
    if not given.isfinite().all():
        raise TaskError(f"{place_of(function)}: gave an advantage that is not finite")
    return given.to(rewards.dtype)


def try_out(for_objective: ObjectiveConfig, for_advantage: AdvantageConfig) -> None:
    """Calls those of the two that are a user's own, with a few numbers. Raises TaskError if one cannot be
    loaded, raises, gives something else than it should, or has no gradient."""
    learns_without_advantage(for_objective)
    for one in parts_of(for_advantage).values():
        if isinstance(one, PythonAdvantage):
            advantage(torch.tensor([0.0, 1, 1, 0]), torch.tensor([0, 0, 1, 1]), one)


def learns_without_advantage(cfg: ObjectiveConfig) -> bool:
    """Returns True if J may have a gradient where A = 0, which no built-in objective has: a response without an
    advantage needs no backward pass then. Raises TaskError as `try_out` does."""
    return isinstance(cfg, PythonObjective) and _tried(msgspec.msgpack.encode(cfg))


@cache
def _tried(cfg: bytes) -> bool:
    own = msgspec.msgpack.decode(cfg, type=PythonObjective)
    if not _gradient(own, torch.tensor([1.0, 1, 1, 1, -1, -1, -1, -1])).any():
        place = place_of(_load(own.path, own.digest, "objective"))
        raise TaskError(f"{place}: J has no gradient; it comes from x.log_ratio and x.logprobs")
    return bool(_gradient(own, torch.zeros(8)).any())


def _gradient(cfg: PythonObjective, advantages: Tensor) -> Tensor:
    """Returns the gradient [8] of the sum of J in the log-probs of two made-up responses. Raises TaskError if
    either is not finite."""
    proximal = torch.tensor([-1.0, -0.5, -2.0, -0.1, -3.0, -0.7, -1.5, -0.2])
    logprobs = proximal + torch.tensor([0.02, -0.03, 0.1, -0.1, 0.01, 0.3, -0.3, -0.05])
    inputs = LossInputs(
        logprobs=logprobs.requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=proximal - torch.tensor([0.0, 0.01, -0.2, 0.05, 0.9, -0.6, 0.0, 0.1]),
        advantages=advantages,
        mask=torch.tensor([True] * 7 + [False]),
        sequence_ids=torch.tensor([0] * 4 + [1] * 4),
        num_sequences=2,
        version_lag=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
    )
    with torch.enable_grad():
        total = objective(ratios(inputs), cfg).objective[inputs.mask].sum()
        if not total.requires_grad:
            return torch.zeros(8)
        (gradient,) = torch.autograd.grad(total, inputs.logprobs)
    if not (total.isfinite() and gradient.isfinite().all()):
        place = place_of(_load(cfg.path, cfg.digest, "objective"))
        raise TaskError(f"{place}: J, or its gradient, is not finite")
    return gradient


def _check(given: Any, like: Tensor, function: Callable[..., Any]) -> None:
    """Raises TaskError if `given` is not a tensor of the shape of `like`."""
    found = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
    if found != list(like.shape):
        raise TaskError(
            f"{place_of(function)}: gave {found} where a tensor {list(like.shape)} is due"
        )
