"""Leaves out problems whose prompts leave no room for a response, and logs their number. Imports no torch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Task, Tokenizer
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import Joined, parts_of

logger = logging.getLogger(__name__)
SLACK = 64
"""Number of tokens by which a template around a prompt may be longer than around an empty one"""


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
        "%d problems are left out: their prompts have more than %d tokens", left_out, longest
    )
    return _Kept(train, heldout)


def short(problems: Sequence[Problem], tokenizer: Tokenizer, longest: int) -> Sequence[Problem]:
    """Returns the problems whose prompts have at most `longest` tokens; generated ones as they are."""
    if isinstance(problems, Lazy):
        return problems
    if isinstance(problems, Joined):
        parts = {name: short(part, tokenizer, longest) for name, part in problems.parts.items()}
        return Joined(parts, problems.weights)
    # A token has at least one byte, so that a prompt with few bytes is known to be short without encoding it.
    around = len(tokenizer.encode_prompt("")) + SLACK

    def fits(problem: Problem) -> bool:
        size = len(problem.prompt.encode(errors="replace"))
        surely = not problem.messages and size + around <= longest
        return surely or len(tokenizer.encode_prompt(problem.asked)) <= longest

    return tuple(p for p in problems if fits(p))
