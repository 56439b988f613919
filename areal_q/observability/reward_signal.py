"""Rewards whose computation fails: their counts are in the metrics, and the newest cause in each worker's
heartbeat."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from areal_q.config import Mix, Python, RewardConfig, TaskConfig

_StepMetrics = Mapping[str, Any]


class RewardFailures:
    """What a run's records say of failed rewards; `add` takes them one by one."""

    def __init__(
        self, task: TaskConfig, reward: RewardConfig, records: Iterable[_StepMetrics] = ()
    ) -> None:
        self._name = reward_name(task, reward)
        self.count, self._last = 0, ""
        for record in records:
            self.add(record)

    def add(self, record: _StepMetrics) -> None:
        self.count += failed_rewards([record])[0]
        # In the learner itself they are structs.
        for worker in msgspec.to_builtins(record.get("workers", [])):
            if failure := worker.get("failure"):
                self._last = f": {failure} ({worker['worker']})"

    def __str__(self) -> str:
        """How often the reward failed, and how it did so last."""
        count = "once" if self.count == 1 else f"{self.count:,} times"
        return f"the reward {self._name} failed {count}{self._last}"


def failed_rewards(steps: Iterable[_StepMetrics]) -> tuple[int, Counter[str]]:
    """Returns (number of responses whose reward failed, this number by cause) over `steps`."""
    total, causes = 0.0, Counter()
    for step in steps:
        failed = max(step.get("reward/errors") or 0.0, step.get("reward/invalid") or 0.0)
        total += failed
        for key, value in step.items() if failed else ():
            if key.startswith("reward/invalid/") and value:
                causes[key.removeprefix("reward/invalid/")] += value
    return round(total), causes


def failed_text(failed: int, causes: Counter[str], responses: int) -> str:
    """Returns a text such as "30 of 120 responses (25.0%), exception 20, timeout 10". `responses` is the number
    of all responses, or 0 if it is unknown."""
    share = f" of {responses:,} responses ({failed / responses:.1%})" if responses else " responses"
    told = "".join(f", {cause} {count:.0f}" for cause, count in causes.most_common())
    return f"{failed:,}{share}{told}"


def reward_name(task: TaskConfig, reward: RewardConfig) -> str:
    """Returns the judge, or the path of the reward's file, or the task whose grader gives the rewards."""
    if isinstance(task, Mix):
        return "of a task of the mixture"
    if reward.judge:
        return f"by judge {reward.judge.model}"
    path = task.path if isinstance(task, Python) else reward.path
    return path or f"of task.type={task.__struct_config__.tag}"
