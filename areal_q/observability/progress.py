"""Progress of a run, kept up to date record by record, for the views and for the log of a learner service."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, variance

from areal_q.config import Run
from areal_q.observability.learning_faults import FAULTS, FaultName, LearningJudge, with_advice
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.run_summary import (
    Gap,
    duration,
    held_out,
    of_heldout,
    set_accuracies,
    shown,
    step_line,
    summarize,
    unfaithful,
)
from areal_q.system.run_dir import METRICS_FILE

LINE_EVERY_S = 15.0
"""Seconds from one progress line in a service's log to the next."""
_WINDOW = 20
"""Steps over which the time left is estimated, and whose halves say whether the reward rises."""
_AGAIN = 10
"""A warning is repeated once its steps have grown by this factor."""


class History:
    """The state of a run after the records so far, of bounded size but for one entry per evaluation.

    Example: after 10 of 40 steps at 2 s each, `eta_s` is 60.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.recent: deque[Record] = deque(maxlen=_WINDOW)
        self._first: list[float] = []
        """The mean rewards of the first tenth of the steps, ten at least"""
        self.evals: list[Record] = []
        self.doing = ""
        """What the learner does before the first step, as text; empty before it says so."""
        self.warmstart: Record | None = None
        self.end: Record | None = None
        self.elapsed_s = 0.0
        self.warning = ""
        """The learner's newest warning; empty once it has taken another step."""
        self.episodes = ""
        """The number of episodes that agents play, as text, while a step waits for them; else empty."""
        self.unfaithful: dict[str, Gap] = {}
        """The newest step whose fidelity gap exceeded its bound, by engine."""

    def add(self, record: Record) -> None:
        self.episodes = open_episodes(record) if record["kind"] == "waiting" else ""
        match record["kind"]:
            case "step":
                self.warning = ""
                self.recent.append(record)
                reward = record.get("reward/mean")
                if reward is not None and len(self._first) < max(
                    _WINDOW // 2, self.run.steps // 10
                ):
                    self._first.append(reward)
                self.unfaithful |= {problem.engine: problem for problem in unfaithful([record])}
            case "eval":
                self.evals.append(record)
            case "start":
                self.doing = record["doing"]
            case "warmstart":
                self.warmstart = record
            case "warning":
                self.warning = str(record["message"])
        # A resumed run has further records after an `end` record.
        self.end = record if record["kind"] == "end" else None
        self.elapsed_s = record["elapsed_s"]

    @property
    def last(self) -> Record | None:
        return self.recent[-1] if self.recent else None

    @property
    def step(self) -> int:
        return self.last["step"] if self.last else 0

    @property
    def progress(self) -> tuple[float, float]:
        """(steps done, steps in total) of the warm start or of the training."""
        if self.phase == "warm start" and self.warmstart:
            return self.warmstart["warmstart/step"], self.warmstart["warmstart/steps"]
        return self.step, self.run.steps

    @property
    def phase(self) -> str:
        if self.end:
            return str(self.end.get("reason", "ended"))
        if self.last:
            return "training" if self.step < self.run.steps else "final evaluation"
        if self.warmstart is None:
            return "training" if self.evals or self.episodes else "set-up"
        done = self.warmstart["warmstart/step"] >= self.warmstart["warmstart/steps"]
        return "training" if done or self.evals else "warm start"

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, at the pace of the last _WINDOW steps; None if there is no pace yet."""
        if self.end or len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        pace = (last["elapsed_s"] - first["elapsed_s"]) / max(1, last["step"] - first["step"])
        return pace * (self.run.steps - self.step)

    @property
    def course(self) -> str:
        """The reward from the first tenth of the steps, ten at least, to the newest, such as "0.187 → 0.642,
        rising by 0.031 in 10 steps"; empty before there are _WINDOW steps. A change within two standard errors
        is none."""
        means = [m for record in self.recent if (m := record.get("reward/mean")) is not None]
        if len(means) < _WINDOW:
            return ""
        half = _WINDOW // 2
        before, now = means[:half], means[half:]
        change, error = fmean(now) - fmean(before), math.hypot(*map(_error, (before, now)))
        way = f"{'rising' if change > 0 else 'falling'} by {abs(change):.3f} in {half} steps"
        if abs(change) <= 2 * error:
            way = "level"
        return f"{fmean(self._first):.3f} → {fmean(now):.3f}, {way}"

    @property
    def sets(self) -> dict[str, float | None]:
        """The newest accuracy of each evaluation set, or task of a mixture, by name."""
        return {name: value for r in self.evals for name, value in set_accuracies(r).items()}


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean."""
    return math.sqrt(variance(values) / len(values))


def open_episodes(record: Record) -> str:
    """Returns how many episodes agents play, such as "3 of 64 episodes open"."""
    open_, all_ = record["rollout/open_episodes"], record["rollout/episodes"]
    return f"{open_:.0f} of {all_:.0f} episodes open"


def plain_line(record: Record, history: History) -> str:
    """Returns one record as a line of text; `history` already contains it."""
    head = f"{record['elapsed_s']:7.1f} s  "
    match record["kind"]:
        case "note":
            return f"{head}{record['message']}"
        case "start":
            return f"{head}{record['doing']}"
        case "warmstart" if "cache" in record:
            return f"{head}warm start from the cache: {record['cache']}"
        case "warmstart":
            of = f"{record['warmstart/step']:.0f}/{record['warmstart/steps']:.0f}"
            return f"{head}warm start {of}  loss {shown('{warmstart/loss:.3f}', record)}"
        case "waiting":
            return f"{head}waiting for agents, {open_episodes(record)}"
        case "eval":
            heldout = [held_out(record)] if of_heldout([record]) else []
            sets = set_accuracies(record).items()
            told = [*heldout, *(f"{name} {shown('{x:.3f}', {'x': value})}" for name, value in sets)]
            return f"{head}step {record['step']}/{history.run.steps}  {'  '.join(told)}"
        case "end":
            return f"{head}{record.get('reason', 'ended')} at step {record['step']}"
    eta = "" if history.eta_s is None else f"  left {duration(history.eta_s)}"
    return f"{head}step {record['step']}/{history.run.steps}  {step_line(record)}{eta}"


class FaultWatch:
    """Finds faults of a run in progress, and words the warnings that a view shows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._said: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forgets the records, which are given again from the first one on."""
        self._judge = LearningJudge()

    def add(self, record: Record) -> None:
        self._judge.add(record)

    def lasting(self) -> dict[FaultName, int]:
        """Returns for how many steps each fault has lasted; 0 without it."""
        found = {fault.name: fault.steps for fault in self._judge.faults()}
        return {name: found.get(name, 0) for name in FAULTS}

    def warnings(self) -> list[str]:
        """Returns one sentence for each present fault."""
        return [text for _, _, text in self._problems()]

    def due(self) -> list[str]:
        """Returns the warnings that are new, or whose steps have grown tenfold since they were last
        returned."""
        found = [p for p in self._problems() if p[1] >= _AGAIN * self._said.get(p[0], 0)]
        self._said |= {name: steps for name, steps, _ in found}
        return [text for _, _, text in found]

    def _problems(self) -> list[tuple[str, int, str]]:
        """Returns (name, steps, sentence) of each present fault."""
        return [
            (fault.name, fault.steps, f"{fault.says}; {change}")
            for fault, change in with_advice(self._judge.faults(), self._run)
        ]


class ProgressLog:
    """Writes the run's progress to a log: a line every `every_s` seconds, one for each evaluation and each new
    fault, and a summary at the end. `add` is a sink of the run's MetricsLog, whose earlier records count.

    Example: metrics.also("log", ProgressLog(run, run_dir, logger.info).add)
    """

    def __init__(
        self, run: Run, run_dir: Path, say: Callable[[str], None], every_s: float = LINE_EVERY_S
    ) -> None:
        self._run, self._path, self._say, self._every_s = run, run_dir / METRICS_FILE, say, every_s
        self._history = History(run)
        self._faults = FaultWatch(run)
        for record in read_metrics(self._path) if self._path.exists() else []:
            self._faults.add(record)
        self._faults.due()  # what an earlier learner said
        self._next_line = 0.0

    def add(self, record: Record) -> None:
        """Adds a record to the history, and logs it if a line is due."""
        self._history.add(record)
        self._faults.add(record)
        kind = record["kind"]
        if kind == "end":
            summary = summarize(read_metrics(self._path), self._run)
            self._say(f"{self._run.name}: {summary.title}")
            for label, value in [*summary.rows, ("model", str(self._path.parent / "hf"))]:
                self._say(f"  {label:<17}  {value}")
        elif kind == "eval" or (
            kind not in ("warning", "failing") and time.monotonic() >= self._next_line
        ):
            self._say(plain_line(record, self._history).strip())
            self._next_line = time.monotonic() + self._every_s
        for sentence in self._faults.due():
            self._say(f"warning: {sentence}")

    def lasting_faults(self) -> dict[str, int]:
        """Returns for how many steps each fault has lasted, 0 without it, by `fault/NAME`."""
        return {f"fault/{name}": steps for name, steps in self._faults.lasting().items()}
