"""An environment of the user's own: a class, of which each episode has an object in a process of its own.

    class Environment:                       turns with tools
        def __init__(self, **settings): …    the table rollout.environment.settings
        def reset(self, row): …              begins an episode; a text that it gives follows the prompt
        def add(self, a: int, b: int): …     a tool: type hints and a docstring (tools.py)
        def reward(self, response): …        after the last turn, with what a reward asks for (own_reward.py)

    class Environment:                       turns of text
        def reset(self, row): …
        def step(self, text): …              → (observation, reward, done), or the five of Gymnasium

All but `step`, or the tools, may be missing; without rewards of its own the task's judges. Each may be `async
def`. `close(self)` is called at the end. Names with _ are the class's own. Imports no torch.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import msgspec
from msgspec import json

from areal_q.decode_errors import in_words, untyped
from areal_q.errors import TaskError
from areal_q.plugins import load_function, user_code
from areal_q.tasks.base import Completed, Problem, Score
from areal_q.tasks.environments.tools import OwnTool, tool_of
from areal_q.tasks.grading.child_process import encodable
from areal_q.tasks.grading.own_reward import as_score, scorer_of, scores_of

_NO_TOOLS = ("reset", "step", "reward", "close")
_ASKED = ("row", "prompt", "answer", "messages", "seed")
"""What `reset` may ask for"""


@dataclass(frozen=True)
class OwnEnvironment:
    """The user's class, and what is known of it."""

    path: str
    made_by: type
    steps: bool
    """True if its turns are texts for `step`, False if they are messages that may call tools"""
    tools: Mapping[str, OwnTool]
    scores: bool
    """True if it gives the reward, which else the task's own does"""


class Stepped(msgspec.Struct, frozen=True):
    """What `step` gave. `score` is of the whole episode so far, `reward` of this turn."""

    observation: str
    reward: float
    score: Score
    done: bool


def load_environment(path: str, settings: Mapping[str, Any]) -> OwnEnvironment:
    """Runs the file and returns the class that it names, or its `Environment`. Raises TaskError, with the line,
    for a file that cannot be loaded, a class that cannot be used, and `settings` that it does not take."""
    found = load_function(path, "Environment")
    if not isinstance(found, type):
        raise TaskError(f"{path}: an environment is a class, not {found!r}")
    with user_code(path):
        steps = hasattr(found, "step")
        names = [n for n, _ in inspect.getmembers(found, inspect.isroutine) if n[0] != "_"]
        tools = {n: tool_of(found, n) for n in names if n not in _NO_TOOLS and not steps}
        if not (steps or tools):
            raise TaskError(
                f"{path}: {found.__name__} has neither `step` nor a tool, which is a method without _"
            )
        blank: Any = object.__new__(found)  # without __init__, whose settings are not here
        scores = hasattr(found, "reward") and not steps
        if scores:
            scorer_of(blank.reward, path)
        if hasattr(found, "reset"):
            _arguments_of_reset(blank.reset, path)
        try:
            inspect.signature(found).bind(**settings)
        except TypeError as error:
            raise TaskError(f"{path}: rollout.environment.settings: {error}") from error
    return OwnEnvironment(path, found, steps, tools, scores or steps)


def _arguments_of_reset(reset: Callable[..., Any], path: str) -> Callable[[Mapping[str, Any]], Any]:
    """Returns what calls `reset` with what it asks for, by name, or with all for `**`; a single parameter of
    another name is the row, and others that have a default are left to it."""
    parameters = [*inspect.signature(reset).parameters.values()]
    by_place = [p.name for p in parameters if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)]
    if len(parameters) == len(by_place) == 1 and by_place[0] not in _ASKED:
        return lambda offered: reset(offered["row"])
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if lacking := [p for name, p in named.items() if name not in _ASKED and p.default is p.empty]:
        asks, there = ", ".join(map(str, lacking)), ", ".join(_ASKED)
        raise TaskError(f"{path}: reset asks for {asks}; there are {there}")
    asked = [name for name in _ASKED if name in named or takes_all]
    return lambda offered: reset(**{name: offered[name] for name in asked})


class OwnEpisode:
    """An object of the user's class, in its process. Each method raises what the user's code raises."""

    def __init__(self, own: OwnEnvironment, settings: Mapping[str, Any]) -> None:
        self._own, self._loop = own, asyncio.Runner()
        self._object: Any = own.made_by(**settings)
        self._total = 0.0

    def reset(self, problem: Problem, seed: int) -> str:
        """Begins the episode. Returns what follows the prompt."""
        if not hasattr(self._object, "reset"):
            return ""
        row = json.decode(problem.columns) if problem.columns else {}
        offered = {
            "row": {"prompt": problem.asked, "answer": problem.answer} | row,
            "prompt": problem.prompt,
            "answer": problem.answer,
            "messages": [*problem.messages] or [{"role": "user", "content": problem.prompt}],
            "seed": seed,
        }
        given = self._run(_arguments_of_reset(self._object.reset, self._own.path)(offered))
        # Gymnasium's gives an observation and a table.
        return _text(given[0] if isinstance(given, tuple) and len(given) == 2 else given)

    def call(self, name: str, arguments: str) -> str:
        """Returns the result of a call of a tool or, of one that cannot be made, why not: that is the model's
        own fault, which it is told."""
        tool = self._own.tools.get(name)
        if tool is None:
            return f"error: no tool {name!r}; there are {', '.join(self._own.tools)}"
        try:
            given: Any = json.decode(arguments, type=tool.arguments)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"error: {name}: {in_words(error, tool.arguments, untyped(arguments.encode()))}"
        values = {field: getattr(given, field) for field in given.__struct_fields__}
        return _text(self._run(getattr(self._object, name)(**values)))

    def step(self, text: str) -> Stepped:
        """Returns what follows a turn. The rewards of an episode add up."""
        given = self._run(self._object.step(text))
        match tuple(given):
            case (observation, reward, done):
                info = {}
            case (observation, reward, terminated, truncated, dict(info)):
                done = terminated or truncated
            case _:
                raise ValueError("step gives (observation, reward, done), or Gymnasium's five")
        self._total += float(reward)
        parts = {str(n): v for n, v in info.items() if isinstance(v, str | Real) and n != "reward"}
        score = as_score({**parts, "reward": self._total})
        return Stepped(_text(observation), float(reward), score, bool(done))

    def reward(self, problem: Problem, completed: Completed) -> Score:
        """Returns the reward of an episode with tools."""
        scorer = scorer_of(self._object.reward, self._own.path)
        given = self._run(scorer.call(problem, [completed], 0))
        (found,) = scores_of(given, 1, scorer.whole)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        if hasattr(self._object, "close"):
            self._run(self._object.close())
        self._loop.close()

    def _run(self, given: Any) -> Any:
        return self._loop.run(given) if inspect.iscoroutine(given) else given


def _text(given: Any) -> str:
    """Returns what goes to the model: a text as it is, nothing for None, and JSON for all else."""
    if given is None or isinstance(given, str):
        return encodable(given or "")
    return json.encode(given, enc_hook=str).decode()
