"""Two faults of a run's rewards: rewards whose computation fails, and steps whose rewards are all equal.

Their counts are in the metrics. The cause of a failure is in the workers' logs, in lines that begin with
FAILED.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_q.config import ModelConfig, Python, RewardConfig, SmallModel, TaskConfig, WarmStart
from areal_q.observability.metrics_log import Record
from areal_q.tasks.grading.reward_process import FAILED

_StepMetrics = Mapping[str, Any]

EQUAL_STEPS = 5
"""Number of steps in a row with nothing but equal rewards after which a warning is due."""
_AGAIN = 10
"""A warning is repeated once its count has grown by this factor."""
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


class RewardWatch:
    """Finds faults in the rewards of a run in progress, and words the warnings that a view shows.

    `name` is that of the reward, and `advice` what to do if all rewards are equal.
    """

    def __init__(self, name: str, advice: str, log: FailureLog) -> None:
        self._name, self._advice, self._log = name, advice, log
        self._equal, self._mean = 0, None
        self._said: dict[str, int] = {}

    def add(self, record: Record) -> None:
        if record["kind"] == "step":
            self._equal = self._equal + 1 if _is_equal(record) else 0
            self._mean = record.get("reward/mean")

    def warnings(self) -> list[str]:
        """Returns one sentence for each present fault."""
        return [text for _, _, text in self._problems()]

    def due(self) -> list[str]:
        """Returns the warnings that are new, or whose count has grown tenfold since they were last returned."""
        found = [p for p in self._problems() if p[1] >= _AGAIN * self._said.get(p[0], 0)]
        self._said |= {name: count for name, count, _ in found}
        return [text for _, _, text in found]

    def _problems(self) -> list[tuple[str, int, str]]:
        """Returns (name, count, sentence) of each present fault."""
        problems = []
        if failed := self._log.read():
            text = f"the reward {self._name} failed {times(failed)}: {self._log.last}"
            problems.append(("failed", failed, text))
        if self._equal >= EQUAL_STEPS:
            text = equal_text(self._equal, self._mean, self._advice)
            problems.append(("equal", self._equal, text))
        return problems


def _is_equal(step: _StepMetrics) -> bool:
    """Returns True if all rewards of the step are the same number."""
    return step.get("reward/std") == 0


def equal_steps(steps: Sequence[_StepMetrics]) -> int:
    """Returns how many of the newest steps, without a gap, had nothing but equal rewards."""
    return next((i for i, step in enumerate(reversed(steps)) if not _is_equal(step)), len(steps))


def equal_text(steps: int, mean: float | None, advice: str = "") -> str:
    """Returns a warning, with `advice` if given: "all rewards were 0 for 12 steps: nothing to learn from"."""
    what = "all rewards were equal" if mean is None else f"all rewards were {mean:g}"
    told = f"{what} for {steps:,} step{'s' * (steps != 1)}: nothing to learn from"
    return f"{told}; {advice}" if advice else told


def hint(model: ModelConfig, warmstart: WarmStart) -> str:
    """Returns advice on how an untrained model gets its first right answers; empty if the model is trained."""
    if isinstance(model, SmallModel) and not warmstart.steps:
        return (
            "the built-in model starts from random weights: set warmstart.steps=400, "
            "or take a trained one by model.type=pretrained model.path=DIR"
        )
    return ""


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
