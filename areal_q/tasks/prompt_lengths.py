"""Leaves out problems whose prompts leave no room for a response, and logs their number. Imports no torch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Task, Tokenizer
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import MixedProblems, parts_of

logger = logging.getLogger(__name__)
SLACK = 64
"""Number of tokens, or bytes, by which a template around one prompt may be longer than around another"""
FEW = 1 << 19
"""Bytes of prompts up to which all are encoded, which takes about a second"""


@dataclass
class _Kept:
    train: Sequence[Problem]
    heldout: Sequence[Problem]


def without_long(task: Task, tokenizer: Tokenizer, longest: int) -> Task:
    """Returns `task` without the problems whose prompts have more than `longest` tokens; `task` itself if there
    are none.

    Generated problems are all short and are not checked. Raises TaskError if none would be left.
    """
    train, heldout = (short(p, tokenizer, longest) for p in (task.train, task.heldout))
    left_out = len(task.train) - len(train) + len(task.heldout) - len(heldout)
    if not left_out:
        return task
    if not (all(parts_of(train).values()) and heldout):
        raise TaskError(
            f"every prompt to train on, or held out, has more than {longest} tokens; "
            "rollout.sampling.max_tokens leaves room for no more"
        )
    logger.warning(
        "problems left out, whose prompts have more than %d tokens: %d", longest, left_out
    )
    return _Kept(train, heldout)


def short(problems: Sequence[Problem], tokenizer: Tokenizer, longest: int) -> Sequence[Problem]:
    """Returns the problems whose prompts have at most `longest` tokens; generated ones as they are."""
    if isinstance(problems, Lazy):
        return problems
    if isinstance(problems, MixedProblems):
        parts = {name: short(part, tokenizer, longest) for name, part in problems.parts.items()}
        return MixedProblems(parts, problems.weights)
    many = sum(map(_bytes, problems)) > FEW
    size = _size_at_most(problems, tokenizer, longest) if many else None

    def fits(problem: Problem) -> bool:
        surely = size is not None and not problem.messages and size(problem) <= longest
        return surely or len(tokenizer.encode_prompt(problem.asked)) <= longest

    return tuple(p for p in problems if fits(p))


def _size_at_most(
    problems: Sequence[Problem], tokenizer: Tokenizer, longest: int
) -> Callable[[Problem], int] | None:
    """Returns a function that bounds a prompt's tokens by its bytes, since a token has at least one; None where
    the template does not write each prompt once."""
    texts = [problem for problem in problems if not problem.messages]
    if not texts:
        return None
    least = min(texts, key=_bytes)
    around = len(tokenizer.encode_prompt(least.asked)) + SLACK

    def size(problem: Problem) -> int:
        return _bytes(problem) + around

    def written(problem: Problem) -> int:
        return len(tokenizer.decode(tokenizer.encode_prompt(problem.asked)).encode())

    most = max((p for p in texts if size(p) <= longest), key=_bytes, default=least)
    grown = written(most) - written(least)
    return size if grown <= _bytes(most) - _bytes(least) + SLACK else None


def _bytes(problem: Problem) -> int:
    return len(problem.prompt.encode(errors="replace"))
