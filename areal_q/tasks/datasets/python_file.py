"""Tasks and rewards from the user's own Python file, which is trusted code.

    def problems():                          # for task.type = "python"
        return [("2+2=", "4"), …]            # (prompt or list of messages, answer), or tables of more columns

    def reward(prompt, response, answer):    # or the name in reward.function
        return 1.0 if response.strip() == answer else 0.0

A reward asks by name for what it wants of `prompt`, `response` and `answer`, or is written for TRL:
`(completions, **columns)` → a list. Its result is a number, and a response with 1 or more counts as correct. It
may also be a table of numbers with `reward`, optionally `correct`, and parts to be logged. A coroutine is run
to its end. Imports no torch.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_q.config.tasks import Python
from areal_q.errors import TaskError
from areal_q.messages.trajectories import LARGEST_REWARD
from areal_q.plugins import load_function, place_of, user_code
from areal_q.tasks.base import Problem, Score, columns_of
from areal_q.tasks.datasets.conversations import problem_of

_PLACES = ("prompt", "response", "answer")
_KNOWN = {*_PLACES, "prompts", "completions"}
"""Names that say what a parameter of a reward is"""


def load_score(path: str, name: str) -> Callable[[Problem, str], Score]:
    """Returns the reward function `name` of a file, with its results as scores. It raises what the user's code
    raises. All coroutines run in one event loop, to which a client that the file keeps is bound."""
    function, loop = load_function(path, name), asyncio.Runner()
    with user_code(path):
        arguments = _arguments(function)
    whole = "completions" in _names(function)

    def score(problem: Problem, response: str) -> Score:
        positional, named = arguments(problem, response)
        given = function(*positional, **named)
        given = loop.run(given) if inspect.iscoroutine(given) else given
        return as_score(given[0] if whole else given)

    return score


def _arguments(
    function: Callable[..., Any],
) -> Callable[[Problem, str], tuple[tuple[str, ...], dict[str, Any]]]:
    """Returns what gives a reward function its arguments: by name where all its names say what they are; else
    there are three, which are prompt, response and answer. Raises TaskError, with the line of the function, if
    it asks for something else."""
    names = _names(function)
    offered = _offered(Problem("", ""), "", "completions" in names)
    unknown = [n for n, must in names.items() if must and n not in offered]
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    if not unknown and not kinds & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.POSITIONAL_ONLY,
    }:
        everything = inspect.Parameter.VAR_KEYWORD in kinds
        wanted = [n for n in offered if everything or n in names]

        def by_name(problem: Problem, response: str) -> tuple[tuple[str, ...], dict[str, Any]]:
            given = _offered(problem, response, "completions" in names)
            return (), {name: given[name] for name in wanted}

        return by_name
    # By place, a parameter with the name of another one would be given the wrong text.
    astray = [n for n, due in zip(names, _PLACES, strict=False) if n in _KNOWN and n != due]
    try:
        inspect.signature(function).bind(*_PLACES)
    except TypeError:
        astray += ["arguments by place"]
    if astray:
        raise TaskError(
            f"{place_of(function)}: a reward asks for {', '.join(unknown or astray)}; there are "
            f"{', '.join(offered)}, or three of any name: {', '.join(_PLACES)}"
        )
    return lambda problem, response: ((problem.prompt, response, problem.answer), {})


def _names(function: Callable[..., Any]) -> dict[str, bool]:
    """Returns the parameters that can be given by name, and whether each must be."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind in by_name}


def _offered(problem: Problem, response: str, whole: bool) -> dict[str, Any]:
    """Returns what a reward may ask for, by name; if `whole`, as lists of one entry, in the words of TRL. All
    are texts, also of a conversation, of which a ticket has no more."""
    if whole:
        answers = [problem.answer]
        return {"prompts": [problem.prompt], "completions": [response], "answer": answers}
    return {"prompt": problem.prompt, "response": response, "answer": problem.answer}


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
    return [
        _problem(row, cfg, f"{cfg.path}: problems()[{index}]") for index, row in enumerate(rows)
    ]


def _problem(row: Any, cfg: Python, where: str) -> Problem:
    """Returns the problem of a pair, or of a table, whose other columns go to the reward."""
    match row:
        case (str() | list() as prompt, str(answer)):
            return problem_of(prompt, answer, cfg.template, where)
        case {"prompt": str() | list() as prompt, "answer": str(answer)}:
            return problem_of(prompt, answer, cfg.template, where, columns_of(row, where))
        case _:
            raise TaskError(
                f"{where}: must be a pair, or a table with `prompt` and `answer`: the prompt is a text or a "
                "list of messages, the answer a text"
            )


def _number(name: str, value: Any) -> float:
    number = float(value)
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {number}")
    return number
