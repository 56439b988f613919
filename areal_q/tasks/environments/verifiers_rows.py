"""The tasks of a taskset of verifiers as problems, asked of a process in its own environment. Without torch."""

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import MsgspecError, Struct, json

from areal_q.config.tasks import VerifiersTask
from areal_q.errors import ConfigError, TaskError
from areal_q.system.processes import READY, die_with_parent, environment_at, supervised_program
from areal_q.tasks.base import Message, Problem
from areal_q.tasks.datasets.jsonl_rows import split_heldout

PLAYER = Path(__file__).with_name("verifiers_player.py")
_START_S = 600.0
"""Seconds in which the tasks must be there: a taskset may fetch its data"""


class _Row(Struct):
    key: str
    name: str | None
    messages: list[Message]
    answer: str


class _Told(Struct):
    rows: list[_Row] = []
    error: str = ""


class Taskset:
    """Problems that are the tasks of a taskset. Their columns have the place of each in it; the last share is
    held out."""

    def __init__(self, cfg: VerifiersTask) -> None:
        """Raises ConfigError without an environment that has verifiers, TaskError for a taskset or a harness
        that cannot be loaded there."""
        where = f"task.env.taskset.id = {cfg.env['taskset']['id']!r}"
        rows = _rows(python_of(cfg), told_of(cfg), where)
        problems = [_problem(row, index, where) for index, row in enumerate(rows)]
        train, heldout = split_heldout(problems, cfg.heldout, where)
        self.train: Sequence[Problem] = tuple(train)
        self.heldout: Sequence[Problem] = tuple(heldout)


def command_of(python: str) -> list[str]:
    """Returns the command of verifiers_player.py, below a supervisor (areal_q/system/processes.py)."""
    return supervised_program(python, "-P", str(PLAYER))


def told_of(cfg: VerifiersTask, **others: Any) -> bytes:
    """Returns the first line of its input."""
    told = {"env": cfg.env, "path": str(Path(cfg.directory).absolute()), "problems": cfg.problems}
    return json.encode(told | others) + b"\n"


def python_of(cfg: VerifiersTask) -> str:
    """Returns the Python that has verifiers. Raises ConfigError without, or for one that may not be run."""
    there = environment_at("verifiers")
    if cfg.python is None and not (there / READY).exists():
        raise ConfigError(
            "task.type = 'verifiers' needs an environment of its own: areal-q setup verifiers makes it; or "
            "task.python"
        )
    python = Path(cfg.python or there / "bin" / "python")
    if not os.access(python, os.X_OK) or python.is_dir():
        why = "may not be run" if python.exists() else "no such file"
        mend = "" if cfg.python else "; areal-q setup verifiers --anew makes it again"
        raise ConfigError(f"task.python: {python}: {why}{mend}")
    return str(python.absolute())


@cache
def _rows(python: str, told: bytes, where: str) -> list[_Row]:
    with subprocess.Popen(
        command_of(python),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    ) as process:
        try:
            found, told_of_errors = process.communicate(told, timeout=_START_S)
        except subprocess.TimeoutExpired as error:
            raise TaskError(f"{where}: its tasks were not there after {_START_S:.0f} s") from error
        finally:
            process.terminate()
    try:
        answer = json.decode(found, type=_Told)
    except MsgspecError as error:
        said = told_of_errors.decode(errors="replace").strip().splitlines()
        why = said[-1].removeprefix(f"{python}: ") if said else "no answer"
        raise TaskError(f"{where}: task.python: {python}: {why}") from error
    if answer.error:
        raise TaskError(f"{where}: {' '.join(answer.error.split())}")
    return answer.rows


def _problem(row: _Row, index: int, where: str) -> Problem:
    """A task without a prompt, which its environment begins, is asked for by its name."""
    columns = json.encode({"index": index, "key": row.key}).decode()
    said = [m for m in row.messages if isinstance(m.get("content"), str)]
    if said != row.messages:
        raise TaskError(f"{where}: task {index}: its prompt is not all text")
    if not said:
        return Problem(row.name or f"task {index}", row.answer, columns=columns)
    text = "\n\n".join(m["content"] for m in said)
    return Problem(text, row.answer, tuple(said), columns)
