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
"""Key of the shuffle that splits the problems; it is fixed, so that every run holds out the same ones."""


class ArithmeticTask:
    """All additions of two numbers with `digits` digits; `heldout` of them are never trained on.

    `12+34=` and `34+12=` are two problems, of which both are held out or neither. No problem is stored: the
    unordered pairs are numbered and shuffled, and each gives its two problems (`7+7=` twice).
    """

    def __init__(self, cfg: Arithmetic) -> None:
        """Splits the problems. Raises TaskError if none would be left to train on."""
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
    """Returns the problem at index `place` of the shuffled sequence."""
    pair, swapped = divmod(place, 2)
    a, b = _pair(permute(pair, _unordered_pairs(cfg.digits), SPLIT_KEY))
    low = _lowest(cfg.digits)
    a, b = a + low, b + low
    if swapped:
        a, b = b, a
    answer = str(a + b)
    prompt = cfg.prompt.replace("{a}", str(a)).replace("{b}", str(b))
    return Problem(prompt, answer[::-1] if cfg.reversed else answer)


def _unordered_pairs(digits: int) -> int:
    numbers = 10**digits - _lowest(digits)
    return numbers * (numbers + 1) // 2


def _lowest(digits: int) -> int:
    """Returns the smallest number with `digits` digits. 0 is the only one that begins with 0."""
    return 10 ** (digits - 1) if digits > 1 else 0


def _pair(index: int) -> tuple[int, int]:
    """Returns the unordered pair at `index` of the sequence (0, 0), (1, 0), (1, 1), (2, 0), …"""
    a = (math.isqrt(8 * index + 1) - 1) // 2
    return a, index - a * (a + 1) // 2


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 for exactly the answer, but for spaces around, else 0."""
    correct = response.strip() == problem.answer.strip()
    return Score(float(correct), correct)
