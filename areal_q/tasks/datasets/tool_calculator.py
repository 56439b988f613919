"""Additions with a tool: `12+34=` is answered `(12+34)46 46`, where a calculator wrote `46 `. No torch."""

from collections.abc import Sequence

from areal_q.config.tasks import Arithmetic, ToolCalculator
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.arithmetic import ArithmeticTask
from areal_q.tasks.lazy import Lazy


class ToolCalculatorTask:
    """The problems of the arithmetic task. Their answers demonstrate the call, for a warm start to learn."""

    def __init__(self, cfg: ToolCalculator) -> None:
        """Splits the problems. Raises TaskError if none would be left to train on."""
        plain = ArithmeticTask(Arithmetic(digits=cfg.digits, reversed=False, heldout=cfg.heldout))
        self.train = _with_calls(plain.train)
        self.heldout = _with_calls(plain.heldout)


def _with_calls(problems: Sequence[Problem]) -> Sequence[Problem]:
    return Lazy(lambda place: _with_call(problems[place]), range(len(problems)))


def _with_call(problem: Problem) -> Problem:
    """Returns a problem whose answer has the call: ("12+34=", "46") becomes ("12+34=", "(12+34)46 46")."""
    expression = problem.prompt.removesuffix("=")
    return Problem(problem.prompt, f"({expression}){problem.answer} {problem.answer}")


def answer(response: str) -> str | None:
    """Returns the text after the last space."""
    return response.rpartition(" ")[2] or None


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the text after the last space is that of the demonstration, with or without a
    call, else 0."""
    correct = answer(response) == answer(problem.answer)
    return Score(float(correct), correct)
