"""Problems whose prompts leave no room for a response are left out, and counted. Imports no torch."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Task, Tokenizer
from areal_q.tasks.lazy import Lazy

logger = logging.getLogger(__name__)
SLACK = 64
"""Tokens that a template may have more around a prompt than around an empty one."""


@dataclass
class _Kept:
    train: Sequence[Problem]
    heldout: Sequence[Problem]


def without_long(task: Task, tokenizer: Tokenizer, longest: int) -> Task:
    """Returns `task` without the problems whose prompts have more than `longest` tokens; itself where there are
    none.

    Generated problems are all short and are not looked at. Raises TaskError where none would be left.
    """
    train, heldout = (_short(p, tokenizer, longest) for p in (task.train, task.heldout))
    left_out = len(task.train) - len(train) + len(task.heldout) - len(heldout)
    if not left_out:
        return task
    if not (train and heldout):
        raise TaskError(f"every prompt to train on, or held out, has more than {longest} tokens")
    logger.warning(
        "%d problems are left out: their prompts have more than %d tokens", left_out, longest
    )
    return _Kept(train, heldout)


def _short(problems: Sequence[Problem], tokenizer: Tokenizer, longest: int) -> Sequence[Problem]:
    if isinstance(problems, Lazy):
        return problems
    # No token stands for less than a byte, so that most prompts need not be encoded to be known as short.
    around = len(tokenizer.encode_prompt("")) + SLACK

    def fits(prompt: str) -> bool:
        surely = len(prompt.encode(errors="replace")) + around <= longest
        return surely or len(tokenizer.encode_prompt(prompt)) <= longest

    return tuple(p for p in problems if fits(p.prompt))
