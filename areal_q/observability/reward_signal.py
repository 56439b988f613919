"""Rewards whose computation fails: their counts are in the metrics, and the cause is in the workers' logs, in
lines that begin with FAILED."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_q.config import Python, RewardConfig, TaskConfig
from areal_q.tasks.grading.reward_process import FAILED

_StepMetrics = Mapping[str, Any]

_FAILURE = re.compile(rf"{FAILED}, (\d+) so far: (.*?), for prompt ")


class FailureLog:
    """Counts the failed rewards in the logs of a run's workers; each `read` continues where the last one ended.

    `skip` ignores what the logs contain already. Workers log the 1st, 2nd, 4th, 8th … failure.
    """

    def __init__(self, run_dir: Path, skip: bool = False) -> None:
        self._logs = run_dir / "logs"
        self._offsets = {p: p.stat().st_size for p in self._paths()} if skip else {}
        self._counts: dict[Path, int] = {}
        self.last = ""
        """The newest failure, with the path of its log; empty if there was none."""

    def read(self) -> int:
        """Reads the logs on and returns the number of failures so far; there may be more."""
        for path in self._paths():
            offset = self._offsets.get(path, 0)
            if path.stat().st_size > offset:
                self._read(path, offset)
        return sum(self._counts.values())

    def _paths(self) -> list[Path]:
        return sorted(self._logs.glob("rollout-*.log"))

    def _read(self, path: Path, offset: int) -> None:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(data)
        for line in data.decode(errors="replace").splitlines():
            if found := _FAILURE.search(line):
                self._counts[path] = int(found[1])
                self.last = f"{found[2]} ({path})"


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
    """Returns the path of the reward's file, or else the task whose grader gives the rewards."""
    path = task.path if isinstance(task, Python) else reward.path
    return path or f"of task.type={task.__struct_config__.tag}"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
