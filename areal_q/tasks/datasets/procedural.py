"""Problems and scorers of reasoning-gym, by the name of a dataset there. Imports no torch.

A problem follows from dataset, settings, seed and index alone, so its row names these, and the process that
scores generates it again. Some scorers evaluate an answer as Python: that process is confined
(areal_q/sandbox/confine.py).
"""

import importlib
import re
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from msgspec import json

from areal_q.config.tasks import ReasoningGym
from areal_q.errors import ConfigError, TaskError, installing
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.lazy import without

_ASKED = "{}\n\nGive the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ProceduralTask:
    """Generated problems, of which the first ones are held out, wherever else they occur."""

    def __init__(self, cfg: ReasoningGym) -> None:
        """Raises ConfigError if reasoning-gym is not installed, TaskError for a dataset or settings that it
        does not know, and if no problem would be left to train on."""
        made = partial(_problem, cfg, _generator(_row(cfg, 0)))
        self.heldout: Sequence[Problem] = tuple(map(made, range(cfg.heldout)))
        kept = {problem.prompt for problem in self.heldout}
        none_left = f"task.heldout = {cfg.heldout} holds out all problems of {cfg.dataset}"
        self.train = without(kept, lambda i: made(cfg.heldout + i), cfg.problems, none_left)


def _row(cfg: ReasoningGym, index: int) -> str:
    size = cfg.heldout + cfg.problems
    settings = cfg.settings | {"seed": cfg.seed, "size": size}
    return json.encode({"dataset": cfg.dataset, "settings": settings, "index": index}).decode()


def _problem(cfg: ReasoningGym, data: Any, index: int) -> Problem:
    entry = data[index]
    end = "\n" if cfg.template == "plain" else ""
    prompt = _ASKED.format(entry["question"]) + end
    return Problem(prompt, str(entry["answer"]), columns=_row(cfg, index))


def _generator(row: str) -> Any:
    """Returns the dataset that a problem's row names."""
    named = json.decode(row)
    return _dataset(named["dataset"], json.encode(named["settings"], order="sorted"))


@cache
def _dataset(name: str, settings: bytes) -> Any:
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"task.type = 'reasoning-gym' needs reasoning-gym: {installing('reasoning-gym')}"
        ) from error
    try:
        return reasoning_gym.create_dataset(name, **json.decode(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"task.dataset, task.settings: {name}: {error}") from error


def answer(response: str) -> str | None:
    """Returns what stands between the last <answer> and </answer>; None if there is none."""
    found = _ANSWER.findall(response)
    return found[-1].strip() if found else None


def score(problem: Problem, response: str) -> Score:
    """Returns the score of the dataset's own scorer, 0 to 1, of which 1 is correct. It may raise and hang."""
    data = _generator(problem.columns)
    given = float(data.score_answer(answer(response), data[json.decode(problem.columns)["index"]]))
    return Score(given, given >= 1.0)
