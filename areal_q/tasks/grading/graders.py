"""The built-in graders by name, of which a task's settings name one. Imports no torch."""

import importlib.util

from areal_q.errors import ConfigError, installing
from areal_q.tasks.base import Grader
from areal_q.tasks.datasets import calculator, countdown, gsm8k, procedural, tool_calculator
from areal_q.tasks.datasets.arithmetic import score as exact
from areal_q.tasks.grading import boxed, choice

GRADERS: dict[str, Grader] = {
    "exact": Grader(exact, str.strip, whole=True),
    "number": Grader(calculator.score, calculator.answer, whole=True),
    "final_number": Grader(gsm8k.score, gsm8k.answer),
    # The comparison depends on the text alone, so that the response is the cause if the parser fails.
    "math": Grader(
        boxed.score,
        boxed.answer,
        slow=True,
        zero_on=("exception", "timeout"),
        needs="math_verify",
    ),
    "choice": Grader(choice.score, choice.letter),
    "countdown": Grader(countdown.score, countdown.answer),
    "reasoning-gym": Grader(
        procedural.score,
        procedural.answer,
        slow=True,
        zero_on=("exception", "timeout", "killed"),
        needs="reasoning_gym",
        confined=True,
    ),
    "tool": Grader(tool_calculator.score, tool_calculator.answer, whole=True),
}


def is_confined(source: tuple[str, str, str]) -> bool:
    """Returns whether the process of a reward's source (isolated_reward.py) is confined."""
    return source[0] == "grader" and GRADERS[source[1]].confined


def check_extra(name: str) -> None:
    """Raises ConfigError if grader `name` needs an extra that is not installed."""
    needs = GRADERS[name].needs
    if needs and importlib.util.find_spec(needs) is None:
        raise ConfigError(f"grader {name!r} needs {needs}: {installing(name)}")
