"""Rows of data as questions with worked answers, or as they are, and their split. Imports no torch."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from areal_q.errors import TaskError
from areal_q.tasks.base import columns_of
from areal_q.tasks.datasets.row_files import converted, read_objects

T = TypeVar("T")


class WorkedRow(msgspec.Struct, frozen=True):
    """A question and its worked answer, such as "Natalia sold 48/2 = <<48/2=24>>24 …\\n#### 72"."""

    where: str
    """File and line, for messages: `train.jsonl:12`"""
    question: str
    answer: str
    columns: str = ""
    """The whole row, as Problem.columns"""


class _Line(msgspec.Struct, frozen=True):
    question: str
    answer: str


def read_rows(path: str) -> list[WorkedRow]:
    """Returns the rows of what row_files.py reads. Raises TaskError naming file and line, and ConfigError if
    the Hub needs an extra that is not installed."""
    rows = read_objects(path)
    return [
        WorkedRow(where, line.question, line.answer, columns_of(row, where))
        for (where, row), (_, line) in zip(rows, converted(rows, _Line), strict=True)
    ]


def kept_for_training(rows: int, heldout: float) -> int:
    """Returns how many of so many rows are trained on: all but a share, or an integer of them, at least 0."""
    return max(0, rows - (heldout if isinstance(heldout, int) else round(heldout * rows)))


def check_rows(rows: Sequence[Any], path: str) -> None:
    """Raises TaskError if there are none, whatever is held out of them."""
    if not rows:
        raise TaskError(f"{path}: there are no rows in it")


def split_heldout(rows: Sequence[T], heldout: float, path: str) -> tuple[Sequence[T], Sequence[T]]:
    """Returns the rows to train on and the held-out ones, which are the last share, or the last so many.
    Raises TaskError if either is empty."""
    check_rows(rows, path)
    cut = kept_for_training(len(rows), heldout)
    if not 0 < cut < len(rows):
        lost = "train on" if cut == 0 else "hold out"
        raise TaskError(
            f"{path}: task.heldout = {heldout} of {len(rows)} rows leaves none to {lost}"
        )
    return rows[:cut], rows[cut:]
