"""Rewards whose computation fails: their counts are in the metrics, and the newest cause in each worker's
heartbeat."""

from collections.abc import Mapping
from typing import Any

import msgspec

from areal_q.config import Mix, Python, RewardConfig, TaskConfig

_CAUSE = "buffer/invalid/"


class RewardFailures:
    """What a run's records say of failed rewards, those of dropped groups as well; `add` takes them one by one.

    Example: "the reward failed for 30 of 120 responses (25.0%), exception 20, timeout 10: raised KeyError: 'a',
    in mine.py:7 (rollout-0)"
    """

    def __init__(self) -> None:
        self.count = self.responses = self.left_out = 0
        """Numbers of responses: whose reward failed; of all; of those out of training for it"""
        self._unscored: dict[str, int] = {}
        """Number of answers without a score, of the newest evaluation by each set, and by each source, whose
        answers count for their set as well"""
        self._causes: dict[str, float] = {}
        self._last = ""

    def add(self, record: Mapping[str, Any]) -> None:
        if record.get("buffer/responses") is not None:
            self.count = round(record.get("buffer/reward_errors") or 0)
            self.responses = round(record["buffer/responses"])
            counts = {k.removeprefix(_CAUSE): v for k, v in record.items() if k.startswith(_CAUSE)}
            self._causes = {cause: n for cause, n in counts.items() if n}
            self.left_out = round(sum(self._causes.values()))
        if record["kind"] == "eval":
            counts = {k: round(v or 0) for k, v in record.items() if k.endswith("/invalid")}
            self._unscored |= counts
        # In the learner itself they are structs.
        for worker in msgspec.to_builtins(record.get("workers", [])):
            if failure := worker.get("failure"):
                self._last = f": {failure} ({worker['worker']})"

    @property
    def _evaluated(self) -> int:
        return max(self._unscored.values(), default=0)

    def __bool__(self) -> bool:
        """True if a reward failed. Of agents, who may report a failure and then succeed, counts tell."""
        return bool(self.count or self._evaluated or (self._last and not self.responses))

    def __str__(self) -> str:
        """How often the reward failed, and how it did so last."""
        if self.count:
            share = f"{self.count:,} of {self.responses:,} responses ({self.count / self.responses:.1%})"
            by_cause = sorted(self._causes.items(), key=lambda item: -item[1])
            told = "".join(f", {cause} {count:,.0f}" for cause, count in by_cause)
            return f"the reward failed for {share}{told}{self._last}"
        if self._evaluated:
            return f"{self._evaluated:,} answers of an evaluation have no score{self._last}"
        return f"the reward fails{self._last}"


def reward_name(task: TaskConfig, reward: RewardConfig) -> str:
    """Returns the judge, or the path of the reward's file, or the task whose grader gives the rewards."""
    if isinstance(task, Mix):
        return "of a task of the mixture"
    if reward.judge:
        return f"by judge {reward.judge.model}"
    path = task.path if isinstance(task, Python) else reward.path
    return path or f"of task.type={task.__struct_config__.tag}"
