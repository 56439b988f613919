"""Rows to learn from: conversations, prompts and answers; what is held out; what is refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.chain_models import byte_tokenizer

from areal_q.config import Chat, Sft
from areal_q.errors import TaskError
from areal_q.tasks import CharTokenizer, Problem, Tokenizer, load_tokenizer, problem_at
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import Mixture
from learner.data.packing import Sample
from learner.supervised.demonstrations import (
    Demonstrations,
    Rows,
    encoded,
    read_demonstrations,
    sample_of,
)

TALK = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return load_tokenizer(tmp_path / "model", Chat())


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def told(sample: Sample, tokenizer: Tokenizer) -> tuple[str, str]:
    """(the prompt, what follows with | before and after what is learnt)"""
    ids, mask = sample.trajectory.response_ids.numpy(), sample.trajectory.loss_mask.numpy()
    text = ""
    for place, id in enumerate(ids):
        text += "|" * int(mask[place] != (mask[place - 1] if place else 0))
        text += tokenizer.decode([int(id)])
    return tokenizer.decode(sample.prompt_ids.tolist()), text + "|" * int(mask[-1])


def test_a_prompt_and_its_answer_are_as_a_rollout_has_them(tmp_path: Path, tokenizer: Tokenizer):
    data = written(tmp_path / "a.jsonl", {"q": "2+2?", "a": 4}, {"q": TALK[:1], "a": "4"})
    rows = read_demonstrations(Sft(path=data, prompt="q", answer="a", heldout=0))
    first, second = (sample_of(n, *encoded(row, tokenizer)) for n, row in enumerate(rows.train))
    assert first.prompt_ids.tolist() == tokenizer.encode_prompt("2+2?")
    assert told(first, tokenizer) == told(second, tokenizer)
    assert told(first, tokenizer)[1] == "|4<|im_end|>|"
    assert (first.advantage, first.lag.tolist()) == (1.0, [0, 0])


def test_a_conversation_has_every_reply_learnt(tmp_path: Path, tokenizer: Tokenizer):
    again = [*TALK, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes"}]
    rows = read_demonstrations(
        Sft(path=written(tmp_path / "a.jsonl", {"messages": again}), heldout=0)
    )
    prompt, rest = told(sample_of(0, *encoded(rows.train[0], tokenizer)), tokenizer)
    assert prompt == tokenizer.decode(tokenizer.encode_messages(TALK[:1]))
    asked = "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert rest == f"|4<|im_end|>|{asked}|Yes<|im_end|>|"


def test_parquet_may_fill_messages_with_nulls(tmp_path: Path, tokenizer: Tokenizer):
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]
    talk = [*TALK, {"role": "assistant", "content": "", "tool_calls": calls}]
    filled = [{"name": None, "tool_calls": None, **message} for message in talk]
    pq.write_table(pa.Table.from_pylist([{"messages": filled}]), tmp_path / "a.parquet")
    json_rows = written(tmp_path / "b.jsonl", {"messages": filled})
    parquet, own = (
        [json.loads(row.columns)["messages"] for row in rows.train]
        for path in (tmp_path / "a.parquet", json_rows)
        for rows in [read_demonstrations(Sft(path=str(path), heldout=0))]
    )
    assert own == [talk], "what a call says is null is its own"
    assert parquet == [json.loads(json.dumps(talk).replace(', "b": null', ""))]


def test_calls_and_tools_may_be_written_as_json(tmp_path: Path):
    talk = [TALK[0], {"role": "assistant", "tool_calls": [CALL]}]
    path = written(tmp_path / "a.jsonl", {"messages": talk, "tools": '[{"type": "function"}]'})
    (row,) = read_demonstrations(Sft(path=path, heldout=0)).train
    read = json.loads(row.columns)
    assert read["tools"] == [{"type": "function"}]
    assert read["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_what_is_held_out_is_nowhere_learnt_from(tmp_path: Path):
    rows = [{"prompt": f"{n}=", "answer": n} for n in (1, 2, 3, 1, 4, 1)]
    path = written(tmp_path / "a.jsonl", *rows)
    found = read_demonstrations(Sft(path=path, heldout=0.3, template="plain"))
    assert [r.answer for r in found.heldout] == ["4", "1"]
    assert [r.answer for r in found.train] == ["2", "3"]
    other = written(tmp_path / "b.jsonl", *rows[:2])
    found = read_demonstrations(Sft(path=path, heldout=other, template="plain"))
    assert [r.answer for r in found.train] == ["3", "4"]


@pytest.mark.parametrize(
    ("rows", "heldout", "said"),
    [
        ([], 0.1, r"a\.jsonl: there are no rows in it$"),
        ([1, 2], 2, r"a\.jsonl: sft\.heldout = 2 of 2 rows leaves none to learn from$"),
        ([1, 1], 1, r"a\.jsonl: every row to learn from is also held out$"),
        ([1, 2], "b.jsonl", r"b\.jsonl: there are no rows in it$"),
    ],
)
def test_why_no_row_is_learnt_from_or_held_out_is_said(
    tmp_path: Path, rows: list[int], heldout: float | str, said: str
):
    path = written(tmp_path / "a.jsonl", *({"prompt": f"{n}=", "answer": n} for n in rows))
    if isinstance(heldout, str):
        heldout = written(tmp_path / heldout)
    with pytest.raises(TaskError, match=said):
        read_demonstrations(Sft(path=path, heldout=heldout, template="plain"))


def test_each_pass_has_every_short_row_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"prompt": f"{n}=", "answer": "5" * (40 if n == 3 else 1)} for n in range(10, 20)]
    path = written(tmp_path / "a.jsonl", *rows, {"prompt": "3=", "answer": "5" * 40})
    read = read_demonstrations(Sft(path=path, heldout=0, template="plain"))
    told: list[tuple[int, int]] = []
    data = Demonstrations(read, CharTokenizer(), 16, seed=1)
    data.encode(8, lambda *now: told.append(now))
    assert data.size == 10 and "1 rows are left out" in caplog.text
    assert told == [(0, 11)]
    passes = [[data.at(n) for n in range(start, start + 10)] for start in (0, 10)]
    prompts = [[s.prompt_ids.tobytes() for s in one] for one in passes]
    assert [s.ticket for s in passes[1]] == list(range(10, 20))
    assert sorted(prompts[0]) == sorted(prompts[1]) and prompts[0] != prompts[1]


def test_a_first_token_that_is_learnt_is_context(tokenizer: Tokenizer):
    sample = sample_of(0, [5, 6, 7], [True, True, False])
    assert sample.prompt_ids.tolist() == [5]
    assert np.array_equal(sample.trajectory.loss_mask.numpy(), [1, 0])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": TALK[:1]}, "has none of the assistant"),
        ({"messages": "hi"}, "has none of the assistant"),
        ({"messages": [{"role": "user", "content": 3}]}, "is no message"),
        ({"messages": [*TALK, {"content": "x"}]}, "is no message"),
        (
            {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{}]}]},
            "`tool_calls` are not",
        ),
        ({"messages": TALK, "tools": "{"}, "`tools` is no JSON"),
        ({"messages": TALK, "tools": "1"}, "`tools` is not a list"),
        ({"prompt": "2+2?", "answer": ""}, "`answer` is empty"),
        ({"prompt": "2+2?"}, "no field `answer`"),
        ({"answer": "4"}, "no field `prompt`"),
        ({"prompt": TALK[:1], "answer": "4"}, r"needs sft\.template = 'chat'"),
    ],
)
def test_rows_without_a_lesson_are_refused_with_their_line(tmp_path: Path, row: Any, reason: str):
    path = written(tmp_path / "a.jsonl", {"messages": TALK}, row)
    with pytest.raises(TaskError, match=rf"a\.jsonl:2: .*{reason}"):
        read_demonstrations(Sft(path=path, template="plain"))


def test_a_template_s_refusal_names_the_row(tmp_path: Path):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    byte_tokenizer(template=strict).save_pretrained(tmp_path / "m")
    path = written(tmp_path / "a.jsonl", {"messages": [{"role": "system", "content": "x"}, *TALK]})
    data = Demonstrations(
        read_demonstrations(Sft(path=path, heldout=0)),
        load_tokenizer(tmp_path / "m", Chat()),
        64,
        seed=0,
    )
    with pytest.raises(TaskError, match=r"a\.jsonl:1: the chat template"):
        data.encode(1, lambda done, of: None)


def test_rows_that_are_all_too_long_are_refused():
    data = Demonstrations(Rows([Problem("1=", "1" * 9)], []), CharTokenizer(), 4, seed=0)
    with pytest.raises(TaskError, match="every row has more than 4 tokens"):
        data.encode(1, lambda done, of: None)


def test_a_mixture_is_learnt_by_its_weights():
    numbers = [Problem(f"{n}=", str(n)) for n in range(6)]
    few, many = (Rows(part, []) for part in (numbers[:2], numbers[2:]))
    mixed = Mixture({"few": few, "many": many}, {"few": 3, "many": 1})
    asked = [problem_at(mixed, number, 7).answer for number in range(16)]
    assert sum(answer in "01" for answer in asked) == 12
    data = Demonstrations(mixed, CharTokenizer(), 16, seed=7)
    for _ in ("as for a warm start", "encoded"):
        drawn = [data.at(number).trajectory.response_ids.numpy()[:1] for number in range(16)]
        assert [CharTokenizer().decode(ids.tolist()) for ids in drawn] == asked
        data.encode(8, lambda done, of: None)
    assert data.size == 6


@dataclass
class Own:
    """A task, as others than a file's rows are."""

    train: Sequence[Problem]
    heldout: Sequence[Problem] = ()


def test_a_task_s_own_rows_are_checked_and_short(caplog: pytest.LogCaptureFixture):
    long, short = Problem("1=", "1" * 20), Problem("2=", "2")
    data = Demonstrations(Own([long, short], [short, long]), CharTokenizer(), 8, 0)
    data.encode(8, lambda done, of: None)
    assert data.size == 1 and "1 rows are left out" in caplog.text
    assert len(data.heldout) == 1 and "1 held-out rows are left out" in caplog.text
    odd = Problem("2=", "\N{SNOWMAN}")
    made = Lazy(lambda place: odd, range(10**9))
    for train, where in (([short, odd], "row 2: "), (made, "")):
        with pytest.raises(TaskError, match=f"{where}.*\N{SNOWMAN}"):
            Demonstrations(Own(train), CharTokenizer(), 8, 0).encode(8, lambda done, of: None)
