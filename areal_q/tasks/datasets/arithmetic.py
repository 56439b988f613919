"""Additions: `12+34=` is answered `64` when digits are reversed, `46` otherwise. Imports no torch."""

import math
from collections.abc import Sequence
from functools import partial

from areal_q.config.tasks import Arithmetic
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.shuffle import permute

SPLIT_KEY = 0
"""The same problems are held out in every run, whatever its seed."""


class ArithmeticTask:
    """All pairs of numbers of `digits` digits; `heldout` of them are never trained on.

    `12+34=` and `34+12=` are two problems, but both are held out or neither is. None is stored: the
    unordered pairs are numbered, then shuffled, and each gives its two problems (twice `7+7=`).
    """

    def __init__(self, cfg: Arithmetic) -> None:
        """Raises TaskError when nothing would be left to train on."""
        additions = 2 * _unordered_pairs(cfg.digits)
        heldout = cfg.heldout + cfg.heldout % 2
        if heldout >= additions:
            raise TaskError(
                f"task.heldout = {cfg.heldout} leaves none of the {additions} additions to train on"
            )
        make = partial(addition, cfg)
        self.heldout: Sequence[Problem] = Lazy(make, range(heldout))
        self.train: Sequence[Problem] = Lazy(make, range(heldout, additions))


def addition(cfg: Arithmetic, place: int) -> Problem:
    """Returns the problem that stands in `place` of the shuffled sequence."""
    pair, swapped = divmod(place, 2)
    a, b = _pair(permute(pair, _unordered_pairs(cfg.digits), SPLIT_KEY))
    low = _lowest(cfg.digits)
    a, b = a + low, b + low
    if swapped:
        a, b = b, a
    answer = str(a + b)
    return Problem(f"{a}+{b}=", answer[::-1] if cfg.reversed else answer)


def _unordered_pairs(digits: int) -> int:
    numbers = 10**digits - _lowest(digits)
    return numbers * (numbers + 1) // 2


def _lowest(digits: int) -> int:
    """0 is the one number of a single digit that starts with 0."""
    return 10 ** (digits - 1) if digits > 1 else 0


def _pair(index: int) -> tuple[int, int]:
    """Unordered pair `index` of (0, 0), (1, 0), (1, 1), (2, 0), …"""
    a = (math.isqrt(8 * index + 1) - 1) // 2
    return a, index - a * (a + 1) // 2


def score(problem: Problem, response: str) -> Score:
    """1 for exactly the answer's digits, else 0."""
    correct = response.strip() == problem.answer
    return Score(float(correct), correct)
