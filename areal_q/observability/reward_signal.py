"""What the rewards of a run say about themselves: scores that fail, and steps whose rewards are all equal.

Counts are in the metrics; why a score failed is in the logs of the workers, in lines that begin with FAILED.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_q.config import Python, Run, SmallModel
from areal_q.observability.metrics_log import Record
from areal_q.tasks.grading.reward_process import FAILED

_StepMetrics = Mapping[str, Any]

EQUAL_STEPS = 5
"""Steps in a row with nothing but equal rewards, after which this is said."""
_AGAIN = 10
"""What was said is said again once its count is so many times as large."""
_FAILURE = re.compile(rf"{FAILED}, (\d+) so far: (.*?), for prompt ")


class FailureLog:
    """The failures that the workers of a run logged; `read` reads on where it stopped.

    `skip` leaves out what is in the logs already. The workers log the 1st, 2nd, 4th, 8th … failure.
    """

    def __init__(self, run_dir: Path, skip: bool = False) -> None:
        self._logs = run_dir / "logs"
        self._offsets = {p: p.stat().st_size for p in self._paths()} if skip else {}
        self._counts: dict[Path, int] = {}
        self.last = ""
        """What the newest failure was, and the log that tells it."""

    def read(self) -> int:
        """Failures so far, at least."""
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
    """What a view says about the rewards of a run that goes on."""

    def __init__(self, run: Run, run_dir: Path, skip: bool = False) -> None:
        self._run, self._log = run, FailureLog(run_dir, skip)
        self._equal, self._mean = 0, None
        self._said: dict[str, int] = {}

    def add(self, record: Record) -> None:
        if record["kind"] == "step":
            self._equal = self._equal + 1 if _is_equal(record) else 0
            self._mean = record.get("reward/mean")

    def warnings(self) -> list[str]:
        """One sentence for each thing that is wrong now."""
        return [text for _, _, text in self._problems()]

    def due(self) -> list[str]:
        """Returns the sentences that are new, or whose count has grown tenfold since they were last
        said."""
        found = [p for p in self._problems() if p[1] >= _AGAIN * self._said.get(p[0], 0)]
        self._said |= {name: count for name, count, _ in found}
        return [text for _, _, text in found]

    def _problems(self) -> list[tuple[str, int, str]]:
        """(name, count, sentence) of each."""
        problems = []
        if failed := self._log.read():
            text = f"the reward {reward_name(self._run)} failed {times(failed)}: {self._log.last}"
            problems.append(("failed", failed, text))
        if self._equal >= EQUAL_STEPS:
            text = equal_text(self._equal, self._mean, hint(self._run))
            problems.append(("equal", self._equal, text))
        return problems


def _is_equal(step: _StepMetrics) -> bool:
    """Returns True if all rewards of the step are the same number."""
    return step.get("reward/std") == 0


def equal_steps(steps: Sequence[_StepMetrics]) -> int:
    """How many of the newest steps, in a row, had nothing but equal rewards."""
    return next((i for i, step in enumerate(reversed(steps)) if not _is_equal(step)), len(steps))


def equal_text(steps: int, mean: float | None, advice: str = "") -> str:
    """Example: "all rewards were 0 for 12 steps: nothing to learn from"."""
    what = "all rewards were equal" if mean is None else f"all rewards were {mean:g}"
    told = f"{what} for {steps:,} step{'s' * (steps != 1)}: nothing to learn from"
    return f"{told}; {advice}" if advice else told


def hint(run: Run) -> str:
    """Returns what gives a model that knows nothing its first right answers; empty where that is no way out."""
    if isinstance(run.model, SmallModel) and not run.warmstart.steps:
        return (
            "the built-in model starts from random weights: set warmstart.steps=400, "
            "or take a trained one by model.type=pretrained model.path=DIR"
        )
    return ""


def failed_rewards(steps: Iterable[_StepMetrics]) -> tuple[int, Counter[str]]:
    """(responses whose reward failed, these by cause)."""
    total, causes = 0.0, Counter()
    for step in steps:
        failed = max(step.get("reward/errors") or 0.0, step.get("reward/invalid") or 0.0)
        total += failed
        for key, value in step.items() if failed else ():
            if key.startswith("reward/invalid/") and value:
                causes[key.removeprefix("reward/invalid/")] += value
    return round(total), causes


def failed_text(failed: int, causes: Counter[str], responses: int) -> str:
    """Example: "30 of 120 responses (25 %), exception 20, timeout 10". `responses` 0: not known."""
    share = f" of {responses:,} responses ({failed / responses:.1%})" if responses else " responses"
    told = "".join(f", {cause} {count:.0f}" for cause, count in causes.most_common())
    return f"{failed:,}{share}{told}"


def reward_name(run: Run) -> str:
    """Returns the file of the reward, or the name of what judges the answers."""
    path = run.task.path if isinstance(run.task, Python) else run.reward.path
    return path or f"of task.type={run.task.__struct_config__.tag}"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
