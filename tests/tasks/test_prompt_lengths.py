"""Prompts too long for the model are left out of a task, counted, and never met by a worker."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.chain_models import CHATML, byte_tokenizer

from areal_q.config import Chat, load
from areal_q.errors import TaskError
from areal_q.tasks import CharTokenizer, Problem, build_task, load_tokenizer
from areal_q.tasks.base import Message
from areal_q.tasks.prompt_lengths import short, without_long


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
    assert line == "problems left out, whose prompts have more than 200 tokens: 3"


def test_a_task_of_short_prompts_stays_what_it_is():
    made = build_task(load(None, ["task.type=arithmetic"]).task)
    assert without_long(made, CharTokenizer(), 200) is made


def test_a_task_of_long_prompts_alone_is_refused():
    with pytest.raises(TaskError, match="more than 5 tokens"):
        without_long(Given(300), CharTokenizer(), 5)


TWICE = CHATML.replace("m['content']", "m['content'] + m['content']")
NO_EMPTY = (
    "{% for m in messages %}{% if not m['content'] %}{{raise_exception('a message is empty')}}"
    "{% endif %}{% endfor %}" + CHATML
)
TOLD = CHATML.replace(
    "m['content']", "m['content'] + ('so' * 300 if 'long' in m['content'] else '')"
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 bytes of prompts are few."""
    monkeypatch.setattr("areal_q.tasks.prompt_lengths.FEW", 1 << 12)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("template", [CHATML, TWICE, NO_EMPTY, TOLD])
@pytest.mark.parametrize("others", [3, 600])
def test_what_a_template_makes_of_a_prompt_decides(
    tmp_path: Path, template: str, others: int
) -> None:
    """The bound of one that writes each content once let longer ones through, and an evaluation ended."""
    byte_tokenizer(template=template).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, Chat())
    lengths = [8, 150, 300, 500, *[9] * others]
    problems = [Problem("x" * n, "1") for n in lengths]
    if template is not TOLD or others < 600:  # of many, one that is told more is not looked for
        problems.append(Problem("a long one", "1"))
    kept = [p for p in problems if len(tokenizer.encode_prompt(p.asked)) <= 400]
    assert list(short(problems, tokenizer, 400)) == kept
    assert len(kept) < len(problems)


@pytest.mark.usefixtures("few")
def test_many_short_prompts_are_not_all_encoded() -> None:
    class Counting(CharTokenizer):
        encoded = 0

        def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
            self.encoded += 1
            return super().encode_prompt(prompt)

    tokenizer, problems = Counting(), [Problem("1" * (1 + n % 9), "1") for n in range(2000)]
    assert len(short(problems, tokenizer, 200)) == len(problems) and tokenizer.encoded < 9
