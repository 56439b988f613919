"""Tasks whose problems are the rows of a file. Imports no torch.

Each has a reader that returns all problems of the file, and `FileTask` splits them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from areal_q.config.tasks import Choice, Gsm8k, Jsonl, Math, Python
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem
from areal_q.tasks.datasets import benchmark_fields, gsm8k, python_file
from areal_q.tasks.datasets.jsonl_rows import split_heldout

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

    def __init__(self, cfg: Gsm8k | Math | Choice | Jsonl | Python) -> None:
        """Reads the file. Raises TaskError naming file and line."""
        rows = READERS[type(cfg)](cfg)
        if isinstance(cfg.heldout, str):
            train, heldout = rows, READERS[type(cfg)](replace(cfg, path=cfg.heldout))
            if not heldout:
                raise TaskError(f"{cfg.heldout}: task.heldout has no problem")
        else:
            train, heldout = split_heldout(rows, cfg.heldout, cfg.path)
        self.heldout: Sequence[Problem] = tuple(heldout)
        kept = {p.prompt for p in heldout}
        self.train: Sequence[Problem] = tuple(p for p in train if p.prompt not in kept)
        if not self.train:
            raise TaskError(f"{cfg.path}: every prompt to train on is also held out")
