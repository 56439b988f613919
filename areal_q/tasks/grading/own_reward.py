"""A reward of the user's own: what it asks for, and what it gives. Imports no torch.

    def reward(prompt, response, answer):     one response; it asks by name for what NAMES has
    async def reward(response, row):          the same, and many run at once
    def reward_group(rows):                   all responses to a prompt, a table of NAMES each → a list
    def reward(completions, **columns):       the same as TRL calls it: a list for each column → a list; it may
                                              call `log_extra(name, texts)` and `log_metric(name, number)`

A result is a number, and a response with 1 or more counts as correct; or a table of numbers with `reward`,
optionally `correct`, and parts to be averaged, of which texts go to the log. Whatever else a function has
parameters for, `reward.settings` may give. The signature is read once, when the file is loaded.
"""

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from msgspec import json
from msgspec.structs import replace

from areal_q.errors import TaskError
from areal_q.messages.tokens import LARGEST_REWARD
from areal_q.messages.trajectories import LONGEST_NOTE
from areal_q.plugins import load_function, place_of, user_code
from areal_q.tasks.base import Completed, Problem, Score
from areal_q.tasks.grading.child_process import encodable

NAMES = {
    "prompt": "the text of the prompt",
    "response": "the text of the response, without the token that ended it",
    "answer": "the problem's answer",
    "row": "the problem's row in the data, as a table of all its columns",
    "messages": "the prompt as a list of messages",
    "completion_ids": "the tokens of the response",
    "finish_reason": '"stop", "length" or "timeout"',
    "group": "the texts of all responses to this prompt, this one among them",
}
"""What a reward may ask for"""
_PLACES = ("prompt", "response", "answer")
_KNOWN = {*NAMES, "prompts", "completions", "rows"}
"""Names that say what a parameter of a reward is"""
_NOT_BY_NAME = ("prompt", "completion", "completion_ids")
"""Columns that TRL does not hand over"""

_NONE: Mapping[str, Any] = {}
Given = dict[str, Any] | tuple[Any, ...]
Responses = Sequence[Completed]


@dataclass(frozen=True)
class Scorer:
    """A reward as its process calls it: `call(problem, responses, index)` gives what is given for one response,
    or, if `whole`, for all of them."""

    call: Callable[[Problem, Responses, int], Any]
    path: str = ""
    """The user's file; "" for a built-in grader"""
    ids: bool = False
    """True if it gets the tokens of responses"""
    group: bool = False
    """True if it gets all responses to the prompt for each"""
    at_once: bool = False
    """True for a coroutine function, which scores many responses at once"""
    whole: bool = False
    """True if one call scores all responses to a prompt"""


def load_reward(path: str, name: str, settings: Mapping[str, Any] = _NONE) -> Scorer:
    """Returns the reward `name` of a file, or its `reward_group` where it has no `reward`. Raises TaskError,
    with the line, for a file that cannot be loaded, or a function that lacks a setting or asks for more."""
    function = load_function(path, name, *["reward_group"] * (name == "reward"))
    return scorer_of(function, path, settings)


def scorer_of(
    function: Callable[..., Any], path: str, settings: Mapping[str, Any] = _NONE
) -> Scorer:
    """Returns the reward that a function of file `path` is. Raises TaskError as `load_reward` does."""
    with user_code(path):
        anything = inspect.Parameter.VAR_KEYWORD in _kinds(function)
        names = _names(function)
        for name in settings:
            if name in _KNOWN or not (anything or name in names):
                raise TaskError(
                    f"{place_of(function)}: takes no setting `{name}`, which reward.settings has"
                )
        names = {n: must for n, must in names.items() if n not in settings}
        whole, arguments, as_trl = True, _rows, None
        if "completions" in names:
            arguments = as_trl = _as_trl(function, names)
        elif "rows" not in names and getattr(function, "__name__", "") != "reward_group":
            whole, arguments = False, _one(function, names, settings)

    def call(problem: Problem, responses: Responses, index: int) -> Any:
        given = arguments(problem, responses, index)
        if not isinstance(given, dict):
            return function(*given, **settings)
        logged = _Logged()
        wanted = logged.functions.items() if arguments is as_trl else ()
        given |= {n: f for n, f in wanted if anything or n in names}
        return logged.added_to(function(**{**given, **settings}))

    called = (inspect.unwrap(function), type(function).__call__)  # an object's may be a coroutine
    return Scorer(
        call,
        path,
        ids=anything or arguments is _rows or "completion_ids" in names,
        group="group" in names,
        at_once=any(map(inspect.iscoroutinefunction, called)),
        whole=whole,
    )


@dataclass
class _Logged:
    """What a function written for TRL logs beside its rewards, in one call."""

    extras: dict[str, list[str]] = field(default_factory=dict)
    """A text for each response, by name"""
    metrics: dict[str, list[float]] = field(default_factory=dict)

    @property
    def functions(self) -> dict[str, Callable[[str, Any], None]]:
        """What TRL's GRPOTrainer hands over beside the columns, by name."""
        return {"log_extra": self._extra, "log_metric": self._metric}

    def _extra(self, column: str, values: Sequence[Any]) -> None:
        self.extras.setdefault(column, []).extend(_cut(str(value)) for value in values)

    def _metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(_number(name, value))

    def added_to(self, given: Any) -> Any:
        """Returns the rewards of the call, or the coroutine that gives them, as scores: each with its texts,
        and with the mean of each metric as a part."""
        if inspect.iscoroutine(given):
            return self._added_later(given)
        if not (self.extras or self.metrics):
            return given
        entries = [*given]
        for column, values in self.extras.items():
            if len(values) != len(entries):
                raise ValueError(
                    f"log_extra({column!r}) got {len(values)} values for {len(entries)} responses"
                )
        parts = {name: fmean(values) for name, values in self.metrics.items()}
        return [
            self._scored(entry, parts, {n: texts[i] for n, texts in self.extras.items()})
            for i, entry in enumerate(entries)
        ]

    async def _added_later(self, given: Any) -> Any:
        return self.added_to(await given)

    @staticmethod
    def _scored(entry: Any, parts: dict[str, float], notes: dict[str, str]) -> Any:
        try:
            score = as_score(entry)
        except (ValueError, TypeError):
            return entry  # no score, of which `scores_of` says why
        return replace(score, parts=score.parts | parts, notes=score.notes | notes)


def _one(
    function: Callable[..., Any], names: dict[str, bool], settings: Mapping[str, Any]
) -> Callable[[Problem, Responses, int], Given]:
    """Returns what gives a function its arguments beside the settings that scores one response: by name where
    all its names say what they are; else there are three, which are prompt, response and answer. Raises
    TaskError, with the line of the function, if it asks for something else."""
    unknown = [n for n, must in names.items() if must and n not in NAMES]
    kinds = _kinds(function)
    if not unknown and not kinds & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.POSITIONAL_ONLY,
    }:
        everything = {*NAMES} - {"group"} if inspect.Parameter.VAR_KEYWORD in kinds else set[str]()
        wanted = [n for n in NAMES if n in names or n in everything]
        return lambda problem, responses, index: _offered(problem, responses, index, wanted)
    # By place, a parameter with the name of another one would be given the wrong text.
    astray = [n for n, due in zip(names, _PLACES, strict=False) if n in _KNOWN and n != due]
    try:
        inspect.signature(function).bind(*_PLACES, **settings)
    except TypeError:
        astray += ["arguments by place"]
    if astray:
        raise TaskError(
            f"{place_of(function)}: a reward asks for {', '.join(unknown or astray)}; there are "
            f"{', '.join(NAMES)}, or three of any name: {', '.join(_PLACES)}; reward.settings may give more"
        )
    return lambda problem, responses, i: (problem.prompt, responses[i].text, problem.answer)


def _rows(problem: Problem, responses: Responses, index: int) -> Given:
    names = [n for n in NAMES if n != "group"]
    return ([_offered(problem, responses, i, names) for i in range(len(responses))],)


def _as_trl(
    function: Callable[..., Any], names: dict[str, bool]
) -> Callable[[Problem, Responses, int], Given]:
    """Returns what gives a function its arguments that was written for TRL: lists with an entry for each
    response, of conversations where the prompt is one. Raises TaskError as `_one` does."""
    everything = inspect.Parameter.VAR_KEYWORD in _kinds(function)
    if absent := [n for n in ("trainer_state", "environments") if names.get(n)]:
        raise TaskError(
            f"{place_of(function)}: asks for TRL's {absent[0]}, which no worker has: {absent[0]}=None"
        )

    def arguments(problem: Problem, responses: Responses, index: int) -> Given:
        texts = [r.text for r in responses]
        row = {"answer": problem.answer} | row_of(problem)
        offered = {n: [v] * len(texts) for n, v in row.items() if n not in _NOT_BY_NAME}
        offered["prompts"] = [problem.asked] * len(texts)
        offered["completions"] = texts
        if problem.messages:
            said = [[{"role": "assistant", "content": text}] for text in texts]
            offered["completions"] = said
        offered["completion_ids"] = [[*r.ids] for r in responses]
        known = {*offered, *_Logged().functions}
        if missing := [n for n, must in names.items() if must and n not in known]:
            raise TaskError(f"asks for {', '.join(missing)}; there are {', '.join(offered)}")
        return {n: v for n, v in offered.items() if everything or n in names}

    return arguments


def row_of(problem: Problem) -> dict[str, Any]:
    """Returns the columns of the problem's row that it carries."""
    return json.decode(problem.columns) if problem.columns else {}


def _offered(
    problem: Problem, responses: Responses, index: int, names: Sequence[str]
) -> dict[str, Any]:
    """Returns what a reward asks for, by name."""
    completed = responses[index]
    what: dict[str, Callable[[], Any]] = {
        "prompt": lambda: problem.prompt,
        "response": lambda: completed.text,
        "answer": lambda: problem.answer,
        "row": lambda: row_of(problem) or {"prompt": problem.asked, "answer": problem.answer},
        "messages": lambda: [*problem.messages] or [{"role": "user", "content": problem.prompt}],
        "completion_ids": lambda: [*completed.ids],
        "finish_reason": lambda: completed.finish_reason,
        "group": lambda: [r.text for r in responses],
    }
    return {name: what[name]() for name in names}


def _names(function: Callable[..., Any]) -> dict[str, bool]:
    """Returns the parameters that can be given by name, and whether each must be."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind in by_name}


def _kinds(function: Callable[..., Any]) -> set[Any]:
    return {p.kind for p in inspect.signature(function).parameters.values()}


def scores_of(given: Any, count: int, whole: bool) -> list[Score | Exception]:
    """Returns what a reward gave for `count` responses as a score for each, or why it is none. Raises
    ValueError or TypeError for what is no list of so many where `whole` is True."""
    entries = [*given] if whole else [given]
    if len(entries) != count:
        raise ValueError(f"gave {len(entries)} rewards for {count} responses")
    found: list[Score | Exception] = []
    for entry in entries:
        try:
            found.append(as_score(entry))
        except (ValueError, TypeError) as error:
            found.append(error)
    return found


def as_score(given: Any) -> Score:
    """Returns the result of a reward for one response as a score. Raises ValueError or TypeError if it is not a
    number, or is too large to learn from."""
    if isinstance(given, Score):
        return given
    table = given if isinstance(given, Mapping) else {"reward": given}
    table = {encodable(str(name)): value for name, value in table.items()}
    notes = {n: v for n, v in table.items() if isinstance(v, str) and n != "reward"}
    parts = {n: _number(n, v) for n, v in table.items() if n not in notes}
    if "reward" not in parts:
        raise ValueError("the table has no `reward`")
    reward = parts.pop("reward")
    correct = parts.pop("correct", float(reward >= 1.0))
    return Score(reward, bool(correct), parts, notes={n: _cut(text) for n, text in notes.items()})


def _cut(text: str) -> str:
    text = encodable(text)
    return text if len(text) <= LONGEST_NOTE else text[: LONGEST_NOTE - 1] + "…"


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} is {reprlib.repr(value)}, no number") from None
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {number}")
    return number
