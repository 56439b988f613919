"""Tasks whose problems are the rows of a file. Imports no torch.

Each has a reader that returns all problems of the file, and `FileTask` splits them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import json
from msgspec.structs import replace

from areal_q.config.tasks import Choice, Gsm8k, Jsonl, Math, Python
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, columns_of
from areal_q.tasks.datasets import benchmark_fields, gsm8k, python_file
from areal_q.tasks.datasets.jsonl_rows import check_rows, split_heldout

READERS: dict[type, Callable[[Any], list[Problem]]] = {
    Gsm8k: gsm8k.problems,
    Math: benchmark_fields.math_problems,
    Choice: benchmark_fields.choice_problems,
    Jsonl: benchmark_fields.jsonl_problems,
    Python: python_file.problems,
}


class FileTask:
    """A task from a file. The last share of its rows, or another file, is held out, and a prompt in that is not
    trained on."""

    def __init__(
        self, cfg: Gsm8k | Math | Choice | Jsonl | Python, columns: Sequence[str] | None = ()
    ) -> None:
        """Reads the file, and keeps these columns of each row; None is all. Raises TaskError naming file and
        line."""
        rows = with_columns(READERS[type(cfg)](cfg), columns, cfg.path)
        check_rows(rows, cfg.path)
        if isinstance(cfg.heldout, str):
            other = READERS[type(cfg)](replace(cfg, path=cfg.heldout))
            train, heldout = rows, with_columns(other, columns, cfg.heldout)
            if not heldout:
                raise TaskError(f"{cfg.heldout}: task.heldout has no problem")
        else:
            train, heldout = split_heldout(rows, cfg.heldout, cfg.path)
        self.heldout: Sequence[Problem] = tuple(heldout)
        kept = {p.prompt for p in heldout}
        self.train: Sequence[Problem] = tuple(p for p in train if p.prompt not in kept)
        if not self.train:
            raise TaskError(f"{cfg.path}: every prompt to train on is also held out")


def with_columns(
    problems: list[Problem], columns: Sequence[str] | None, path: str
) -> list[Problem]:
    """Returns `problems` with these columns of their rows alone; None is all. Raises TaskError if no row of the
    file has one of them."""
    if columns is None or not any(p.columns for p in problems):
        return problems
    if not columns:
        return [replace(p, columns="") for p in problems]
    rows = [json.decode(p.columns or "{}") for p in problems]
    there = dict.fromkeys(name for row in rows for name in row)
    if missing := next((name for name in columns if name not in there), ""):
        raise TaskError(
            f"{path}: no column `{missing}`, which reward.columns names; there are {', '.join(there)}"
        )
    kept = [{name: row[name] for name in columns if name in row} for row in rows]
    return [
        replace(p, columns=columns_of(row, path)) for p, row in zip(problems, kept, strict=True)
    ]
