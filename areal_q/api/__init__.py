"""What a script or a notebook calls: train, evaluate, replay, report, as the commands.

    import areal_q

    def reward(response, answer):
        return float(response.strip() == answer)

    rows = [{"prompt": "Capital of Peru?", "answer": "Lima"}, …]
    run = areal_q.train(model="DIR", data=rows, reward=reward, steps=100)
    print(run.accuracy)

The learner and its workers are processes of their own, as on the command line, and leave the same directory. So
what is handed over becomes files: rows as JSON lines, a function by its file and name, or by its source
(handed_over.py). Nothing is pickled, and a resumption, a replay and a worker elsewhere find it there.
"""

import asyncio
import ctypes
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from msgspec import json

from areal_q.api.handed_over import Code, file_of_rows, place_of_code
from areal_q.checks.hub import fetched
from areal_q.config import Python, Run, load
from areal_q.config.load import Override
from areal_q.decode_errors import suggestion
from areal_q.errors import CheckpointError, ConfigError, LogError
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.runner.launcher import KILLED, QuietView, launch
from areal_q.runner.live_view import build_view
from areal_q.system.processes import BEGAN
from areal_q.system.run_dir import METRICS_FILE, as_pairs, check_goes_on, path_of, resumes

if TYPE_CHECKING:
    from areal_q.evaluation.estimates import Evaluation

T = TypeVar("T")
Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file or a data set of the Hub (docs/extending.md), or tables with `prompt`, which is a text or messages,
and `answer`"""
Settings = Mapping[str, Any]
"""Settings by their dotted names, such as {"learner.groups": 16}"""


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    directory: Path
    """All that it wrote; `hf/` in it is the model, if it came to its last step"""
    records: Sequence[Record]
    """The lines of its metrics.jsonl"""

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Returns pairs of a step and the value that a metric of docs/metrics.md had in it."""
        return [(r["step"], r[name]) for r in self.records if name in r]

    @property
    def accuracy(self) -> float | None:
        """The newest accuracy on held-out problems; None if there is none."""
        found = self.metric("eval/accuracy")
        return found[-1][1] if found else None


def train(
    model: str | Path | None = None,
    data: Rows | None = None,
    reward: Code | None = None,
    steps: int | None = None,
    *,
    heldout: Rows | float | None = None,
    objective: Code | None = None,
    advantage: Code | None = None,
    order: Code | None = None,
    sampler: Code | None = None,
    environment: Code | None = None,
    tracker: Code | None = None,
    config: str | Path | None = None,
    name: str | None = None,
    settings: Settings | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Trained:
    """Trains until done, and returns the run. Ctrl-C ends it after the step, with a checkpoint; SIGTERM too,
    and then the script by SystemExit.

    `model` is a directory in Hugging Face layout; None is the built-in small one, or that of `config`, which is
    a TOML file or a configuration by name. `heldout` is a share of `data`, or data of its own. A
    `tracker` joins those of the configuration. `settings` win.
    Raises UserError for what the user can correct and ChildDied, with the end of its log, if a process dies.
    """
    if not isinstance(settings, Mapping | None):
        raise ConfigError(
            f"settings: must be a table of names and values, not {type(settings).__name__}"
        )
    base = load(config)
    inputs = Path((settings or {}).get("root", base.root), "inputs")
    codes = {
        "learner.objective": objective,
        "learner.advantage": advantage,
        "learner.order": order,
        "buffer.sampler": sampler,
        "rollout.environment": environment,
        "trackers": tracker,
    }
    given = _handed_over(base, inputs, data, heldout, reward, codes)
    given += [("model", {"type": "pretrained", "path": str(model)})] * (model is not None)
    given += [("steps", steps)] * (steps is not None) + [("name", name)] * (name is not None)
    run = load(config, [*given, *(settings or {}).items()])
    if resume:
        if (again := resumes(run, fetched)) is None:
            raise CheckpointError(f"{path_of(run)}: no checkpoint to resume from")
        run = again
        check_goes_on(path_of(run), run.steps)
    return _launched(run, resume, progress)


def opened(run: str | Path) -> Trained:
    """Returns a run that has ended, or goes on, by its directory. Raises LogError if there is none."""
    if not (file := Path(run) / METRICS_FILE).is_file():
        raise LogError(f"{run}: no such run")
    return Trained(Path(run), read_metrics(file))


def evaluate(
    model: str | Path | Trained,
    data: str | Path | None = None,
    reward: Code | None = None,
    *,
    show: int = 0,
    settings: Settings | None = None,
    **options: Any,
) -> "Evaluation":
    """Scores a run or a model as `areal-q eval` does, and takes its other options, such as `task`, `set`,
    `samples` and `out`, by their names. It works where an event loop runs. Raises UserError."""
    given = as_pairs(settings)
    if reward is not None:
        given.append(("reward.path", place_of_code(reward, Path("runs", "inputs"))))
    for name in ("out", "serve_token"):
        if name in options:
            options[name] = Path(options[name])
    for option, parameter in {"set": "of_set", "serve": "serve_at"}.items():
        if option in options:
            options[parameter] = str(options.pop(option))
    main = import_module("rollout.evaluation.evaluate").main
    known = inspect.signature(main).parameters
    for option in options.keys() - known.keys():
        raise ConfigError(
            f"evaluate: no option {option!r}; {suggestion(option, known)}".rstrip("; ")
        )
    file = None if data is None else Path(data)
    return _apart(lambda: main(_directory(model), given, data=file, show=show, **options))


def replay(
    run: str | Path | Trained,
    settings: Settings | None = None,
    *,
    first: int | None = None,
    stop: int | None = None,
    objective: Code | None = None,
    advantage: Code | None = None,
) -> bool:
    """Repeats the steps of a run from its log as `areal-q replay` does; with settings, or an objective or
    advantage of one's own, as they would have been. Returns False if a step differs from the record."""
    directory, given = _directory(run), as_pairs(settings)
    for place, code in (("objective", objective), ("advantage", advantage)):
        if code is not None:
            path = place_of_code(code, directory.parent / "inputs")
            given.append((f"learner.{place}.path", path))
    main = import_module("learner.replay.cli").main
    try:
        _apart(lambda: main(directory, first, stop, given or None))
    except typer.Exit as end:
        return end.exit_code == 0
    return True


def report(
    *runs: str | Path | Trained, out: str | Path | None = None, max_mb: float = 10.0
) -> Path:
    """Writes the report of a run, or of several in comparison, as `areal-q report` does. Returns its file.
    Raises UserError."""
    if not runs:
        raise ConfigError("report: of which runs?")
    directories = [_directory(run) for run in runs]
    file = Path(out) if out else directories[0] / "report.html"
    import_module("buffer.report.cli").main(directories, file, max_mb=max_mb)
    return file


def _handed_over(
    base: Run,
    inputs: Path,
    data: Rows | None,
    heldout: Rows | float | None,
    reward: Code | None,
    codes: Mapping[str, Code | None],
) -> list[Override]:
    """Returns the settings that name what is handed over, with `codes` by their dotted names, as files in
    `inputs`. Data are of the task of the configuration `base`, if it reads a file."""
    given: list[Override] = []
    if data is not None:
        table = {"path": _file(data, inputs, answers=reward is None)}
        if not hasattr(base.task, "path") or isinstance(base.task, Python):
            table["type"] = "jsonl"
        if not isinstance(data, str | Path) and _is_conversation(Path(table["path"])):
            table["template"] = "chat"
        given.append(("task", table))
    if heldout is not None:
        share = isinstance(heldout, int | float)
        given.append(("task.heldout", heldout if share else _file(heldout, inputs, reward is None)))
    if reward is not None:
        given.append(("reward.path", place_of_code(reward, inputs)))
    for place, code in codes.items():
        if code is not None:
            own = {"type": "python", "path": place_of_code(code, inputs), "digest": ""}
            given.append((place, [*base.trackers, own] if place == "trackers" else own))
    return given


def _launched(run: Run, resume: bool, progress: bool) -> Trained:
    """Runs `run` as a command that begins now."""
    began, os.environ[BEGAN] = os.environ.get(BEGAN), str(time.monotonic())
    try:
        ended = launch(run, resume, build_view if progress else lambda _: QuietView())
    finally:
        del os.environ[BEGAN]
        if began is not None:
            os.environ[BEGAN] = began
    if ended == KILLED:
        raise KeyboardInterrupt
    if ended:  # by SIGTERM or SIGHUP, which are the script's as well
        raise SystemExit(ended)
    return opened(path_of(run))


def _file(data: Rows, inputs: Path, answers: bool) -> str:
    return str(data if isinstance(data, str | Path) else file_of_rows(data, inputs, answers))


def _is_conversation(file: Path) -> bool:
    with file.open("rb") as rows:
        row = json.decode(rows.readline() or b"{}")
    return any(isinstance(row.get(name), list) for name in ("prompt", "messages"))


def _directory(run: str | Path | Trained) -> Path:
    return run.directory if isinstance(run, Trained) else Path(run)


def _apart(work: Callable[[], T]) -> T:
    """Returns what `work` gives, from a thread if an event loop runs in this one, as in a notebook. The stop
    button of one reaches this thread alone, which passes it on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as thread:
        number = thread.submit(threading.get_ident).result()
        try:
            return thread.submit(work).result()
        except KeyboardInterrupt:
            stop = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), stop)
            raise
