"""Additions: `12+34=` is answered `64` when digits are reversed, `46` otherwise. Imports no torch."""

from collections.abc import Sequence
from typing import overload

from areal_q.config.tasks import Arithmetic
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.order import permute

SPLIT_KEY = 0
"""The same problems are held out in every run, whatever its seed"""


class ArithmeticTask:
    """All pairs of numbers of up to `digits` digits; `heldout` of them are never trained on.

    `12+34=` and `34+12=` are two problems. None is stored: the pairs are numbered, then shuffled.
    """

    def __init__(self, cfg: Arithmetic) -> None:
        """Raises TaskError when nothing would be left to train on."""
        pairs = 10 ** (2 * cfg.digits)
        if cfg.heldout >= pairs:
            raise TaskError(
                f"task.heldout = {cfg.heldout} leaves none of the {pairs} additions to train on"
            )
        self.heldout: Sequence[Problem] = Additions(cfg, range(cfg.heldout))
        self.train: Sequence[Problem] = Additions(cfg, range(cfg.heldout, pairs))

    def score(self, problem: Problem, response: str) -> Score:
        return score(problem, response)


class Additions(Sequence[Problem]):
    """The problems that stand in `places` of the shuffled sequence of all pairs."""

    def __init__(self, cfg: Arithmetic, places: range) -> None:
        self._cfg, self._places = cfg, places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | Sequence[Problem]:
        if isinstance(index, slice):
            return Additions(self._cfg, self._places[index])
        base = 10**self._cfg.digits
        a, b = divmod(permute(self._places[index], base * base, SPLIT_KEY), base)
        answer = str(a + b)
        return Problem(f"{a}+{b}=", answer[::-1] if self._cfg.reversed else answer)


def score(problem: Problem, response: str) -> Score:
    """1 for exactly the answer's digits, else 0."""
    correct = response.strip() == problem.answer
    return Score(float(correct), correct)
