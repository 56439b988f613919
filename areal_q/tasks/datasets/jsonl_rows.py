"""Rows of files, of GSM8K on the Hugging Face Hub, and their split. Imports no torch."""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from areal_q.errors import ConfigError, TaskError, installing
from areal_q.tasks.base import columns_of
from areal_q.tasks.datasets.row_files import converted, is_hub_id, read_rows_as, saved_first

T = TypeVar("T")


class Row(msgspec.Struct, frozen=True):
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


def read_rows(path: str) -> list[Row]:
    """Returns the rows of a JSONL file, or of the train split of a Hub data set such as `openai/gsm8k`. Raises
    TaskError, or ConfigError if the Hub needs an extra that is not installed."""
    return _read_hub(path) if is_hub_id(path) else read_jsonl(path)


def read_jsonl(path: str) -> list[Row]:
    """Returns the rows of a file in a format that row_files.py reads. Raises TaskError naming file and line."""
    rows = read_objects(path)
    return [
        Row(where, line.question, line.answer, columns_of(row, where))
        for (where, row), (_, line) in zip(rows, converted(rows, _Line), strict=True)
    ]


def read_objects(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns pairs of a place, such as `train.jsonl:12`, and the object there. Raises TaskError naming file
    and line."""
    return read_rows_as(path, dict[str, Any])


def split_heldout(rows: Sequence[T], share: float, path: str) -> tuple[Sequence[T], Sequence[T]]:
    """Returns the rows to train on and the held-out ones, which are the last `share`. Raises TaskError if
    either is empty."""
    cut = len(rows) - round(share * len(rows))
    if not 0 < cut < len(rows):
        lost = "train on" if cut == 0 else "hold out"
        raise TaskError(f"{path}: task.heldout = {share} of {len(rows)} rows leaves none to {lost}")
    return rows[:cut], rows[cut:]


def _read_hub(name: str) -> list[Row]:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: no such file; a data set of the Hub needs {installing('hf')}"
        ) from error
    try:
        table: Iterable[dict[str, str]] = datasets.load_dataset(name, "main", split="train")
        return [
            Row(where := f"{name}:{i}", row["question"], row["answer"], columns_of(row, where))
            for i, row in enumerate(table, 1)
        ]
    except (OSError, ValueError, KeyError) as error:
        raise TaskError(
            f"{name}: cannot be loaded: {str(error).splitlines()[0]}; {saved_first(name, 'main')}"
        ) from error
