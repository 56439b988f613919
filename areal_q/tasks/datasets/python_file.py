"""Tasks and rewards from the user's own Python file, which is trusted code.

    def problems():                          # for task.type = "python"
        return [("2+2=", "4"), …]            # (prompt or list of messages, answer)

    def reward(prompt, response, answer):    # or the name in reward.function
        return 1.0 if response.strip() == answer else 0.0

A reward is a number, and a response with 1 or more counts as correct. It may also be a table of numbers with
`reward`, optionally `correct`, and parts to be logged. `async def reward` is run to its end. Imports no torch.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_q.config.tasks import Python
from areal_q.errors import TaskError
from areal_q.messages.trajectories import LARGEST_REWARD
from areal_q.plugins import load_function, user_code
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.conversations import problem_of


def load_score(path: str, name: str) -> Callable[[Problem, str], Score]:
    """Returns the reward function `name` of a file, with its results as scores. It raises what the user's code
    raises. All coroutines run in one event loop, to which a client that the file keeps is bound."""
    function, loop = load_function(path, name), asyncio.Runner()

    def score(problem: Problem, response: str) -> Score:
        given = function(problem.prompt, response, problem.answer)
        return as_score(loop.run(given) if inspect.iscoroutine(given) else given)

    return score


def as_score(given: Any) -> Score:
    """Returns the result of a user's reward function as a score. Raises ValueError if it is not a number, or is
    too large to learn from."""
    table = given if isinstance(given, Mapping) else {"reward": given}
    parts = {str(name): _number(str(name), value) for name, value in table.items()}
    if "reward" not in parts:
        raise ValueError("the table has no `reward`")
    reward = parts.pop("reward")
    correct = parts.pop("correct", float(reward >= 1.0))
    return Score(reward, bool(correct), parts)


def problems(cfg: Python) -> list[Problem]:
    """Returns what the file's `problems()` returns. Raises TaskError naming the file, and the index of an empty
    prompt."""
    function = load_function(cfg.path, "problems")
    with user_code(cfg.path, "problems(): "):
        rows = list(function(**cfg.settings))
    if not all(_is_pair(row) for row in rows):
        raise TaskError(
            f"{cfg.path}: problems() must give pairs: a prompt, which is a text or a list of messages, and an "
            "answer, which is a text"
        )
    return [
        problem_of(prompt, answer, cfg.template, f"{cfg.path}: problems()[{index}]")
        for index, (prompt, answer) in enumerate(rows)
    ]


def _is_pair(row: Any) -> bool:
    match row:
        case (str() | list(), str()):
            return True
        case _:
            return False


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {number}")
    return number
