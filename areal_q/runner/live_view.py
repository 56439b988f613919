"""The live view of a run. It reads metrics.jsonl alone, so that it can follow any run.

On a terminal it is a picture that is redrawn, without colours if NO_COLOR is set; in a notebook it is an
output of the cell. Elsewhere (a pipe, CI, a dumb terminal) it is one plain line every few seconds.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from areal_q.checks.settings import served_at
from areal_q.config import External, Run, VerifiersEnvironment
from areal_q.observability.metrics_log import Record, Tail
from areal_q.observability.progress import FaultWatch, History, plain_line
from areal_q.observability.run_end import how_it_ended
from areal_q.observability.run_summary import plural, unfaithful
from areal_q.runner.picture import picture
from areal_q.system import command
from areal_q.system.processes import command_began
from areal_q.system.run_dir import METRICS_FILE, path_of

PLAIN_EVERY_S = 5.0
REDRAW_EVERY_S = 0.5
NOTEBOOK_WIDTH = 100
LOOK_EVERY_S = 2.0
"""Seconds between two checks by `watch` whether the run still goes on"""


class _Following:
    """The common part of both views, which reads new records of the metrics into a History."""

    def __init__(self, run: Run, console: Console) -> None:
        self.run, self.console = run, console
        self.history = History(run)
        self._tail = Tail(path_of(run) / METRICS_FILE)
        self.faults = FaultWatch(run)
        self.heard = time.monotonic()

    def start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._tail = Tail(run_dir / METRICS_FILE)
        self.heard = command_began()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        pass

    def finish(self) -> None:
        """Prints the summary."""
        from areal_q.runner.final_screen import last_screen

        last_screen(self.run, self.run_dir, self.console)

    def pull(self) -> list[Record]:
        """Adds the new records to the history and returns them."""
        records, restarted = self._tail.read()
        if restarted:
            self.history = History(self.run)
            self.faults.restart()
        for record in records:
            self.history.add(record)
            self.faults.add(record)
            self.heard = time.monotonic()
        return records

    def elapsed_s(self) -> float:
        """Returns the run's age in seconds: that of its last record, and the time since then by this process's
        clock."""
        since = 0.0 if self.history.end else time.monotonic() - self.heard
        return self.history.elapsed_s + since

    def awaited(self) -> str:
        """Returns what the run waits for, or "" if the records show progress."""
        return awaited(self.run, self.history)


class PlainView(_Following):
    """Prints a line every PLAIN_EVERY_S seconds of progress, one for each evaluation, and one for each engine
    whose log-probs do not agree with its weights."""

    _next_line = 0.0
    _awaited = ""

    def start(self, run_dir: Path) -> None:
        super().start(run_dir)
        # The records that a resumed run wrote before were shown then.
        self._since_s = time.time() - 1.0
        self._warned: set[str] = set()
        self.note(f"{self.run.name}: {plural(self.run.steps, 'step')}, writing to {run_dir}")

    def stop(self) -> None:
        self.refresh()

    def refresh(self) -> None:
        fresh = [r for r in self.pull() if r["time_s"] >= self._since_s]
        due = time.monotonic() >= self._next_line
        for record in fresh:
            always = record["kind"] in ("note", "eval", "end") or "cache" in record
            if record["kind"] == "warning":
                self.note(f"warning: {record['message']}")
            elif always or (
                due and record is fresh[-1] and record["kind"] in ("warmstart", "step")
            ):
                self.note(plain_line(record, self.history))
                self._next_line = time.monotonic() + PLAIN_EVERY_S
        if self.awaited() != self._awaited and (due or not self.history.episodes):
            self._awaited = self.awaited()
            if self._awaited:
                self.note(f"{self.elapsed_s():7.1f} s  {self._awaited}")
            if self.history.episodes:
                self._next_line = time.monotonic() + PLAIN_EVERY_S
        for problem in unfaithful(fresh):
            if problem.engine not in self._warned:
                self._warned.add(problem.engine)
                self.note(f"warning: {problem}")
        for sentence in self.faults.due():
            self.note(f"warning: {sentence}")


class LiveView(_Following):
    """A picture at the bottom of the terminal. The launcher's loop redraws it, without a thread."""

    _next_draw = 0.0

    def start(self, run_dir: Path) -> None:
        super().start(run_dir)
        self._live = Live(console=self.console, auto_refresh=False, get_renderable=self._picture)
        self._live.start()

    def refresh(self) -> None:
        if time.monotonic() >= self._next_draw:
            self._next_draw = time.monotonic() + REDRAW_EVERY_S
            for record in self.pull():
                if record["kind"] == "note":
                    self.note(plain_line(record, self.history))
            self._live.refresh()

    def stop(self) -> None:
        self.pull()
        self._live.refresh()
        self._live.stop()

    def _picture(self) -> RenderableType:
        width, warnings = self.console.width, self.faults.warnings()
        elapsed_s, awaits = self.elapsed_s(), self.awaited()
        return picture(self.run.name, self.history, elapsed_s, warnings, awaits, width)


class NotebookView(_Following):
    """The picture as one output of the cell, which is replaced as the run goes on."""

    _next_draw = 0.0

    def start(self, run_dir: Path) -> None:
        super().start(run_dir)
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._output: Any = display(self._bundle(), raw=True, display_id=True)

    def refresh(self) -> None:
        if time.monotonic() >= self._next_draw:
            self._next_draw = time.monotonic() + REDRAW_EVERY_S
            self.stop()

    def stop(self) -> None:
        self.pull()
        self._output.update(self._bundle(), raw=True)

    def _bundle(self) -> dict[str, str]:
        warnings, width = self.faults.warnings(), NOTEBOOK_WIDTH
        shown = picture(
            self.run.name, self.history, self.elapsed_s(), warnings, self.awaited(), width
        )
        page = command.page(width)
        with page.capture() as text:
            page.print(shown)
        return {"text/plain": text.get()}


def build_view(run: Run, console: Console | None = None) -> PlainView | LiveView | NotebookView:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if console is None and hasattr(shell, "kernel"):
        return NotebookView(run, command.page(NOTEBOOK_WIDTH))
    console = console or command.console()
    plain = not console.is_terminal or console.is_dumb_terminal or bool(os.environ.get("CI"))
    return PlainView(run, console) if plain else LiveView(run, console)


def watch(run: Run, run_dir: Path, console: Console | None = None) -> None:
    """Follows a run, whoever started it, until it ends or Ctrl-C."""
    view = build_view(run, console)
    view.start(run_dir)
    next_look, ended = 0.0, None
    try:
        while not ended:
            view.refresh()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_EVERY_S
                ended = how_it_ended(run_dir)
            time.sleep(0.1)
    except KeyboardInterrupt:
        return
    finally:
        view.stop()
    if not ended[1]:
        view.note(f"{run_dir}: {ended[0]}")


def awaited(run: Run, history: History) -> str:
    """Returns what the run waits for, such as "evaluating 512 problems"; "" while the records show progress."""
    if history.end or history.phase == "warm start":
        return ""
    if history.episodes:
        return f"{_plays(run)}, {history.episodes}"
    evaluated = history.evals[-1]["step"] if history.evals else -1
    if history.phase == "set-up" and run.sft:
        return history.doing or "starting: the learner, which reads model and examples"
    if history.phase == "set-up":
        first = "" if run.warmstart.steps else f", then {_evaluating(run)}"
        return history.doing or f"starting: Redis, learner and workers{first}"
    if run.sft and (history.last or history.evals):
        return "writing the model" if history.phase == "final evaluation" else ""
    if history.phase == "final evaluation":
        return _evaluating(run) if evaluated < history.step else "writing the model"
    if history.last:
        return ""
    if evaluated < 0:
        return history.doing or _evaluating(run)
    if not isinstance(run.rollout.environment, External):
        return "first step"
    needed = plural(run.learner.groups * run.learner.group_size, "episode")
    return f"{_plays(run)}; a step takes {needed}"


def _evaluating(run: Run) -> str:
    return f"evaluating {plural(run.eval.problems, 'problem')}"


def _plays(run: Run) -> str:
    if isinstance(run.rollout.environment, VerifiersEnvironment):
        return "verifiers plays"
    served = [served_at(run.rollout.serve, i) for i in range(run.rollout.workers)]
    urls = [f"http://{host or '127.0.0.1'}:{port}" for host, port in filter(None, served) if port]
    at = ", ".join(urls) or "the endpoint that logs/rollout-0.log names"
    return f"waiting for agents at {at}"
