"""How fast something learns: curves over time, and the one definition of gain per minute."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Point = tuple[float, float]
"""(seconds of training, value)"""

ACCURACY_GOAL = 0.9
REWARD_GOAL = 0.8
"""Answers sampled at temperature 1 err more often than greedy ones"""
SMOOTHED_STEPS = 5

DEFINITION = f"""\
Gain per minute: from the value at the start to the goal, divided by the minutes until the goal is first
reached (linear between two measurements); where it is not reached, the gain up to the last measurement
divided by its time. Goals: {ACCURACY_GOAL} for held-out accuracy (greedy, the same problems for both)
and {REWARD_GOAL} for training reward (mean of {SMOOTHED_STEPS} batches). Both start from the same weights.
The clock of TRL starts with its first batch and stands still during evaluation; ours starts when the
learner has the warm-started weights, so it includes the start of the worker and all evaluations, and an
accuracy counts from when it was known."""


@dataclass
class Curve:
    """One system's training: what it reached and when, and what it worked."""

    accuracy: list[Point] = field(default_factory=list)
    reward: list[Point] = field(default_factory=list)
    batches: int = 0
    tokens: int = 0
    """Response tokens of all batches"""
    seconds: float = 0.0
    """Of training, from the first batch's start to the last batch's end"""
    generate_s: float = 0.0
    """Of these, spent drawing tokens (ours draws meanwhile: 0)"""
    rates: dict[str, float] = field(default_factory=dict)
    """What only this system measures"""

    @property
    def smooth_reward(self) -> list[Point]:
        """The first batch's reward as the value at 0 s, then means over the last SMOOTHED_STEPS batches."""
        values = [v for _, v in self.reward]
        means = []
        for i, (seconds, _) in enumerate(self.reward):
            window = values[max(0, i + 1 - SMOOTHED_STEPS) : i + 1]
            means.append((seconds, sum(window) / len(window)))
        return [(0.0, values[0]), *means[SMOOTHED_STEPS - 1 :]]


def time_to(points: Sequence[Point], goal: float) -> float | None:
    """Seconds until the goal was first reached, linear between two points; None if it never was."""
    t0, v0 = points[0]
    for t, v in points:
        if v >= goal:
            return t if v == v0 else t0 + (t - t0) * (goal - v0) / (v - v0)
        t0, v0 = t, v
    return None


def gain_per_minute(points: Sequence[Point], goal: float) -> float:
    """See DEFINITION. Example: [(0, 0.3), (60, 0.6), (120, 1.0)] towards 0.8 takes 90 s: 0.333 a minute."""
    start, reached = points[0][1], time_to(points, goal)
    if reached:
        return (goal - start) * 60 / reached
    end, value = points[-1]
    return (value - start) * 60 / end


def value_at(points: Sequence[Point], seconds: float) -> float:
    """The last value that was known at that time."""
    return [v for t, v in points if t <= seconds][-1]


def ours(records: Sequence[dict[str, Any]], batch_responses: int) -> Curve:
    """The curve in a run's metrics; time counts from the end of the warm start."""
    began = max(r["elapsed_s"] for r in records if r["kind"] == "warmstart")
    steps = [r for r in records if r["kind"] == "step"]
    tokens = [r["response/tokens_mean"] * batch_responses for r in steps]
    waited = sum(r["learner/wait_s"] for r in steps)
    busy = sum(r["learner/step_s"] for r in steps) - waited
    return Curve(
        accuracy=[
            (r["elapsed_s"] - began if r["step"] else 0.0, r["eval/accuracy"])
            for r in records
            if r["kind"] == "eval" and "eval/accuracy" in r
        ],
        reward=[(r["elapsed_s"] - began, r["reward/mean"]) for r in steps],
        batches=len(steps),
        tokens=round(sum(tokens)),
        seconds=steps[-1]["elapsed_s"] - began,
        rates={
            "train": sum(tokens) / busy,
            "generate": _drawing_rate(steps),
            "learner_idle": waited / (waited + busy),
            "worker_idle": sum(r["rollout/idle_share"] for r in steps) / len(steps),
        },
    )


def _drawing_rate(steps: Sequence[dict[str, Any]]) -> float:
    """Tokens a second while the worker had something to draw, over all heartbeats that are known."""
    seen = [(r["rollout/tokens_per_s"], 1 - r["rollout/idle_share"]) for r in steps]
    return sum(rate for rate, _ in seen) / max(1e-9, sum(busy for rate, busy in seen if rate))


def trls(records: Sequence[dict[str, Any]]) -> Curve:
    """The curve that peers/trl_grpo.py wrote."""
    steps = [r for r in records if r["kind"] == "step"]
    last = steps[-1]
    return Curve(
        accuracy=[(r["elapsed_s"], r["accuracy"]) for r in records if r["kind"] == "eval"],
        reward=[(r["elapsed_s"], r["reward"]) for r in steps],
        batches=len(steps),
        tokens=last["tokens"],
        seconds=last["elapsed_s"],
        generate_s=last["generate_s"],
        rates={
            "train": last["tokens"] / (last["elapsed_s"] - last["generate_s"]),
            "generate": last["tokens"] / last["generate_s"],
        },
    )
