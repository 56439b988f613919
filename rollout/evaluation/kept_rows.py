"""`areal-q eval … --keep 0.2..0.8 --out train.jsonl`: the training problems that a model solves sometimes, as
rows for `task.path`."""

import json
import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer

from areal_q.config.tasks import ReasoningGym, TaskConfig, VerifiersTask
from areal_q.errors import ConfigError, os_errors_as
from areal_q.evaluation.estimates import Answered
from areal_q.observability.run_summary import plural
from areal_q.system.files import write_whole
from areal_q.tasks import Problem
from rollout.evaluation.questions import EvalQuestions

SAMPLES = 8
"""Answers to each problem where --samples names no other number"""
PASS_RATE = "pass_rate"
"""The column with the share of right answers"""


class WantedRows(NamedTuple):
    """The pass rates that are kept, from `low` to `high`, and the file for their rows."""

    low: float
    high: float
    out: Path


def wanted_rows(keep: str, out: Path | None) -> WantedRows:
    """Returns what --keep and --out say. Raises ConfigError for anything but LOW..HIGH within 0 and 1, and for
    a file that exists, which may be the data themselves, or that would not be read as JSON lines."""
    low, dots, high = keep.partition("..")
    try:
        bounds = (float(low), float(high))
    except ValueError:
        bounds = (1.0, 0.0)
    if not dots or not 0 <= bounds[0] <= bounds[1] <= 1:
        raise ConfigError(
            f"--keep {keep}: it is LOW..HIGH, shares of right answers such as 0.2..0.8"
        )
    if out is None:
        raise ConfigError("--keep needs --out FILE, for the rows")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: --keep writes JSON lines; name a file that ends in .jsonl")
    if os.path.lexists(out):
        raise ConfigError(f"--out {out}: it exists, and --keep replaces no file; name a new one")
    return WantedRows(*bounds, out)


def write_rows(asked: EvalQuestions, rows: Sequence[Answered], wanted: WantedRows) -> None:
    """Writes the rows of those of the problems whose pass rate is kept, with all their columns, and says how
    many; without rows it writes no file. A problem none of whose answers could be scored is left out. Raises
    ConfigError if the file cannot be written."""
    lines, hard, easy = [], 0, 0
    for row in rows:
        right = [reply.correct for reply in row.samples if not reply.failed]
        if not right:
            continue
        rate = sum(right) / len(right)
        hard, easy = hard + (rate < wanted.low), easy + (rate > wanted.high)
        if wanted.low <= rate <= wanted.high:
            problem = asked.problems[row.index]
            kept = row_of(problem, asked.run.of(problem.source).task)
            lines.append(msgspec.json.encode(kept | {PASS_RATE: rate}))
    told = f"kept {len(lines)} of {plural(len(rows), 'problem')}, {hard} harder and {easy} easier: "
    if not lines:
        typer.echo(f"{told}{wanted.out} is not written", err=True)
        return
    with os_errors_as(ConfigError, f"--out {wanted.out}"):
        wanted.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(wanted.out, b"".join(line + b"\n" for line in lines))
    typer.echo(f"{told}task.path={wanted.out}", err=True)


def row_of(problem: Problem, task: TaskConfig) -> dict[str, Any]:
    """Returns the row of the data that a problem of `task` is of; of one that is of none, what
    `task.type = "jsonl"` reads, and the columns that say which it is."""
    row = json.loads(problem.columns) if problem.columns else {}
    if row and not isinstance(task, ReasoningGym | VerifiersTask):
        return row
    asked = {"messages": problem.messages} if problem.messages else {"prompt": problem.prompt}
    return asked | {"answer": problem.answer} | row
