"""The calculator annotations of GSM8K: `<<16-3-4=9>>` asks `16-3-4=`, expects `9`. Imports no torch."""

import logging
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from areal_q.config.tasks import Calculator
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.jsonl_rows import WorkedRow, read_rows, split_heldout

logger = logging.getLogger(__name__)

ANNOTATION = re.compile(r"<<(.*?)>>")
EXPRESSION = re.compile(r"[0-9+\-*/().,%]*[0-9][0-9+\-*/().,%]*")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")


class CalculatorTask:
    """Problems with distinct prompts. Those in the last share of the rows are held out and never trained on. If
    a prompt has several results in the file, the first one is used."""

    def __init__(self, cfg: Calculator) -> None:
        """Reads the file. Raises TaskError naming file and line, or if no problem is left to train on or to
        hold out."""
        rows = read_rows(cfg.path)
        train, heldout = (_Annotations(part) for part in split_heldout(rows, cfg.heldout, cfg.path))
        self.heldout: Sequence[Problem] = tuple(heldout.problems.values())
        self.train: Sequence[Problem] = tuple(
            p for prompt, p in train.problems.items() if prompt not in heldout.problems
        )
        self.skipped = train.skipped + heldout.skipped
        """Number of annotations that are not of the form `expression=number`"""
        if not self.train or not self.heldout:
            lost = "hold out" if self.train else "train on"
            raise TaskError(f"{cfg.path}: no annotation <<expression=number>> to {lost}")
        logger.info(
            "%s: %d problems to train on, %d held out, %d malformed annotations skipped",
            cfg.path,
            len(self.train),
            len(self.heldout),
            self.skipped,
        )


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the response is a number equal to the answer (`0.2`, `.20`, `1,000`), else 0."""
    found = parse_number(response)
    correct = found is not None and found == parse_number(problem.answer)
    return Score(float(correct), correct)


def answer(response: str) -> str | None:
    """Returns the number in one spelling, such as "1000.5" for "1,000.50"; None if it is no number."""
    value = parse_number(response)
    return None if value is None else plain_number(value)


def plain_number(value: Decimal) -> str:
    """Returns one spelling for equal numbers: 9.0 is "9", and -0 is "0"."""
    return f"{value.normalize() + 0:f}"


def parse_number(text: str) -> Decimal | None:
    """Returns the text as a decimal number, thousands commas allowed; None if it is anything else."""
    text = text.strip()
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


class _Annotations:
    def __init__(self, rows: Sequence[WorkedRow]) -> None:
        self.problems: dict[str, Problem] = {}
        self.skipped = 0
        for problem in (p for row in rows for p in _parse(row.answer)):
            if problem is None:
                self.skipped += 1
            else:
                self.problems.setdefault(problem.prompt, problem)


def _parse(text: str) -> Iterator[Problem | None]:
    """Yields the problem of each annotation, or None for a malformed one."""
    for body in ANNOTATION.findall(text):
        expression, _, result = body.replace(" ", "").partition("=")
        if EXPRESSION.fullmatch(expression) and parse_number(result) is not None:
            yield Problem(f"{expression}=", result)
        else:
            yield None
