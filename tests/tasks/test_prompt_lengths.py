"""Prompts too long for the model are left out of a task, counted, and never met by a worker."""

import logging
from collections.abc import Sequence

import pytest

from areal_q.config import load
from areal_q.errors import TaskError
from areal_q.tasks import CharTokenizer, Problem, build_task
from areal_q.tasks.prompt_lengths import without_long


class Given:
    def __init__(self, *lengths: int) -> None:
        self.train: Sequence[Problem] = tuple(Problem("1" * n, "1") for n in lengths)
        self.heldout: Sequence[Problem] = (Problem("12", "1"), Problem("1" * 500, "1"))


def test_long_prompts_are_left_out_and_counted_in_one_line(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        kept = without_long(Given(3, 200, 201, 400), CharTokenizer(), 200)
    assert [len(p.prompt) for p in kept.train] == [3, 200]
    assert [len(p.prompt) for p in kept.heldout] == [2]
    (line,) = caplog.messages
    assert line == "3 problems are left out: their prompts have more than 200 tokens"


def test_a_task_of_short_prompts_stays_what_it_is():
    made = build_task(load(None, ["task.type=arithmetic"]).task)
    assert without_long(made, CharTokenizer(), 200) is made


def test_a_task_of_long_prompts_alone_is_refused():
    with pytest.raises(TaskError, match="more than 5 tokens"):
        without_long(Given(300), CharTokenizer(), 5)
