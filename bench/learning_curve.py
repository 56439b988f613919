"""How fast something learns: curves over time, of both systems."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[float, float]
"""(seconds of training, value)"""

DEFINITION = """\
Both start from the same weights and end when the held-out accuracy (greedy, the same problems for both)
reaches the goal; the time is linear between two measurements. Neither clock runs while a system is evaluated:
TRL's stands still, and our checkpoints are evaluated after the run. TRL's starts with its first batch; ours
starts when the learner has the first weights, so it includes the start of the worker. CPU seconds are
those of all threads and processes while the clock runs."""


@dataclass
class Curve:
    """One system's training: what it reached and when, and what it worked."""

    accuracy: list[Point] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    """Seconds at which the batches ended"""
    cpu: list[Point] = field(default_factory=list)
    """CPU seconds that all its processes had taken by then"""
    tokens: int = 0
    """Response tokens of all batches"""
    drawing: float = 0.0
    """Share of the time in which tokens are drawn; ours draws and trains at the same time"""
    training: float = 0.0
    """Share of the time in which the policy is trained"""


def time_to(points: Sequence[Point], goal: float) -> float | None:
    """Seconds until the goal was first reached, linear between two points; None if it never was."""
    t0, v0 = points[0] if points else (0.0, 0.0)
    for t, v in points:
        if v >= goal:
            return t if v == v0 else t0 + (t - t0) * (goal - v0) / (v - v0)
        t0, v0 = t, v
    return None


def value_at(points: Sequence[Point], seconds: float) -> float:
    """The last value that was known at that time."""
    return [v for t, v in points if t <= seconds][-1]


def has_weights(record: dict[str, Any]) -> bool:
    """Returns True for the records that the learner writes when it has its first weights: at the end of a warm
    start, and when it begins to publish them."""
    published = record["kind"] == "start" and record["doing"].startswith("publishing")
    return published or record["kind"] == "warmstart"


def ours(
    records: Sequence[dict[str, Any]],
    accuracies: dict[int, float],
    batch_responses: int,
    cpu: Sequence[Point] = (),
) -> Curve:
    """The curve of a run with these metrics, whose weights after so many steps had these accuracies; time
    counts from the first weights."""
    began = max((r["elapsed_s"] for r in records if has_weights(r)), default=0.0)
    steps = [r for r in records if r["kind"] == "step"]
    waited = sum(r["learner/wait_s"] for r in steps)
    ended = [r["elapsed_s"] - began for r in steps]
    return Curve(
        accuracy=[([0.0, *ended][step], accuracy) for step, accuracy in sorted(accuracies.items())],
        ended=ended,
        cpu=[*cpu],
        tokens=round(sum(r["response/tokens_mean"] for r in steps) * batch_responses),
        drawing=1 - sum(r["rollout/idle_share"] for r in steps) / len(steps),
        training=1 - waited / sum(r["learner/step_s"] for r in steps),
    )


def trls(records: Sequence[dict[str, Any]]) -> Curve:
    """The curve that peers/trl_grpo.py wrote."""
    steps = [r for r in records if r["kind"] == "step"]
    last = steps[-1]
    drawing = last["generate_s"] / last["elapsed_s"]
    return Curve(
        accuracy=[(r["elapsed_s"], r["accuracy"]) for r in records if r["kind"] == "eval"],
        ended=[r["elapsed_s"] for r in steps],
        cpu=[(0.0, 0.0), *((r["elapsed_s"], r["cpu_s"]) for r in steps)],
        tokens=last["tokens"],
        drawing=drawing,
        training=1 - drawing,
    )
