"""What a step works on, and on how many cores."""

from dataclasses import dataclass

from areal_q.checks.memory import linear_weights
from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run
from areal_q.models import DecoderConfig
from areal_q.plan.hardware import Hardware


@dataclass(frozen=True)
class Load:
    """What a step works on."""

    lengths: Lengths
    useful: float = 1.0
    """The part of the groups drawn that the learner uses; the rest is dropped."""


def active_linears(shape: DecoderConfig) -> float:
    """Returns how many weights of the linears a token meets: with experts, those of the few it goes to."""
    if shape.experts is None:
        return linear_weights(shape)
    expert = 3 * shape.width * shape.experts.mlp * len(shape.sparse_layers)
    return linear_weights(shape) - expert * (shape.experts.count - shape.experts.per_token)


def mixing_flop(shape: DecoderConfig, seen: float, chunk: float = 1) -> float:
    """Returns the FLOP of a token's attention to the `seen` ones before it, and of the states that it moves on
    among the tokens of a `chunk`: areal_q/models/layers/gated_delta.py has their products."""
    flop = 4 * seen * shape.heads * shape.head_dim * len(shape.attention_layers)
    if rule := shape.delta:
        within = chunk * (5 * rule.key_dim + 3 * rule.value_dim)
        each = 6 * rule.key_dim * rule.value_dim + within
        flop += len(rule.layers) * rule.value_heads * each
    return flop


def cores_of_learner(run: Run, on: Hardware) -> int:
    return min(run.learner.processes * run.learner.threads, on.device.cores)


def cores_of_worker(run: Run, on: Hardware, workers: int) -> float:
    cores = (on.device.cores - cores_of_learner(run, on)) / workers
    return max(1.0, min(run.rollout.threads, cores))


def share_cores(run: Run, on: Hardware, workers: int) -> bool:
    """Returns True if learner and workers have fewer cores than they would use at the same time."""
    wanted = cores_of_learner(run, on) + workers * cores_of_worker(run, on, workers)
    return on.is_cpu and wanted > on.device.cores
