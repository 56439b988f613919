"""Benchmarks in the fields that their files really have."""

import json
import math
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_q.config import Choice, Gsm8k, Jsonl, Math
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import GRADERS, Problem, all_problems, build_task
from areal_q.tasks.datasets.benchmark_fields import text_of


@pytest.fixture
def write(tmp_path: Path):
    def make(*rows: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return make


MATH_ROWS = [
    pytest.param(
        {"problem": "Q", "solution": r"so $\boxed{\frac{1}{2}}$"}, r"\frac{1}{2}", id="MATH"
    ),
    pytest.param({"problem": "Q", "solution": r"\boxed{1}", "answer": "2"}, "2", id="MATH-500"),
    pytest.param(
        {"ID": "2024-I-1", "Problem": "Q", "Solution": "x", "Answer": 204}, "204", id="AIME"
    ),
    pytest.param({"id": 0, "question": "Q", "answer": 27.0}, "27", id="AMC"),
    pytest.param({"problem": "Q", "solution": r"It is \boxed{1.6 }."}, "1.6", id="Minerva"),
    pytest.param(
        {"question": "Q", "final_answer": ["$2$"], "solution": ["x"]}, "$2$", id="Olympiad"
    ),
    pytest.param({"question": "Q", "answer": "One.\n#### 72"}, "72", id="GSM8K"),
]


@pytest.mark.parametrize(("row", "answer"), MATH_ROWS)
def test_mathematics_is_read_from_the_fields_of_each_benchmark(write, row: dict, answer: str):
    (problem,) = all_problems(Math(path=write(row), template="plain"))
    assert problem == Problem("Problem: Q\nGive the final answer in \\boxed{}.\nSolution:", answer)


GPQA = {
    "Question": "Q",
    "Correct Answer": "yes",
    **{f"Incorrect Answer {i}": f"no{i}" for i in (1, 2, 3)},
}
CHOICES = {"text": ["no", "yes"], "label": ["1", "2"]}
LISTED = [{"text": "no", "label": "A"}, {"text": "yes", "label": "B"}]
CHOICE_ROWS = [
    pytest.param(GPQA, id="GPQA"),
    pytest.param({"question": "Q", "choices": CHOICES, "answerKey": "2"}, id="ARC"),
    pytest.param(
        {"question": {"stem": "Q", "choices": LISTED}, "answerKey": "B"}, id="ARC, original"
    ),
    pytest.param(
        {"question": "Q", "options": ["no", "yes"], "answer": "B", "answer_index": 1}, id="MMLU-Pro"
    ),
    pytest.param({"question": "Q", "choices": ["no", "yes"], "answer": 1}, id="MMLU"),
]


@pytest.mark.parametrize("row", CHOICE_ROWS)
def test_choices_are_read_from_the_fields_of_each_benchmark(write, row: dict):
    (problem,) = all_problems(Choice(path=write(row), template="plain"))
    lines = problem.prompt.splitlines()
    assert lines[0] == "Question: Q" and lines[-1] == "Answer:"
    assert f"{problem.answer}. yes" in lines


def test_right_choice_of_gpqa_takes_every_place_and_keeps_it(write):
    path = write(*({**GPQA, "Question": f"Q{i}"} for i in range(60)))
    once, again = (all_problems(Choice(path=path)) for _ in range(2))
    assert once == again
    assert {p.answer for p in once} == set("ABCD")


@pytest.mark.parametrize(
    ("cfg", "row", "complaint"),
    [
        (Math, {"text": "Q", "answer": "1"}, "none of the fields problem, question"),
        (Math, {"problem": "Q"}, "none of the fields final_answer, answer"),
        (Math, {"problem": "Q", "answer": {"a": 1}}, "field `answer` is not text or a number"),
        (Math, {"problem": "Q", "solution": "\\boxed{ }"}, "the answer is empty"),
        (
            Choice,
            {"question": "Q", "options": ["a", "b"], "answer": "C"},
            "'C' is none of the choices A, B",
        ),
        (Choice, {"question": "Q", "options": ["a", "b"], "answer": 2}, "choice 3 of 2"),
        (Choice, {"question": "Q", "answer": "A"}, "no list of choices"),
        (Choice, {"question": "Q", "options": [1, 2], "answer": "A"}, "not text"),
        (Choice, {"Question": "Q", "Correct Answer": "a"}, "field `Incorrect Answer 1`"),
        (Jsonl, {"prompt": "Q"}, "field `answer`"),
        (Jsonl, {"prompt": "Q", "answer": True}, "field `answer`"),
        (Jsonl, {"prompt": "Q", "answer": None}, "field `answer` is not text or a number"),
    ],
)
def test_a_row_without_its_fields_is_named(write, cfg: type, row: dict, complaint: str):
    with pytest.raises(TaskError, match=rf"rows\.jsonl:1: .*{complaint}"):
        all_problems(cfg(path=write(row)))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "Q", "answer": "1"}, "no field `prompt`; the row has question, answer"),
        ({}, "no field `prompt`; the row has none"),
        ({"prompt": " ", "answer": "1"}, "field `prompt` is empty"),
    ],
)
def test_a_row_without_a_prompt_is_told_what_it_has(write, row: dict, complaint: str):
    with pytest.raises(TaskError, match=f":1: {complaint}"):
        all_problems(Jsonl(path=write(row)))


def test_a_line_that_is_no_object_is_named(write):
    with pytest.raises(
        TaskError, match=r"rows\.jsonl:2: must be a table, not a list; it takes JSON lines"
    ):
        all_problems(Jsonl(path=write({"prompt": "Q", "answer": "A"}, ["Q", "A"])))


def test_jsonl_takes_the_names_of_its_fields_and_of_its_grader(write):
    path = write(*({"in": f"{i}?", "out": i, "prompt": "x"} for i in range(10)))
    cfg = Jsonl(path=path, prompt="in", answer="out", grader="number", heldout=0.2)
    task = build_task(cfg)
    assert [(p.prompt, p.answer) for p in task.heldout] == [("8?", "8"), ("9?", "9")]
    assert len(task.train) == 8
    assert GRADERS[cfg.grader].score(task.heldout[0], "8.0").correct
    assert not GRADERS[Jsonl(path=path).grader].score(task.heldout[0], "8.0").correct


def test_a_generated_task_has_no_file_to_read():
    from areal_q.config import Arithmetic, Countdown

    for cfg in (Arithmetic(), Countdown()):
        with pytest.raises(ConfigError, match="reads no such file"):
            all_problems(cfg)


def test_gsm8k_is_read_whole(write):
    path = write(*({"question": f"{i}?", "answer": f"#### {i}"} for i in range(3)))
    assert [p.answer for p in all_problems(Gsm8k(path=path))] == ["0", "1", "2"]


NUMBERS = {
    27.0: "27",
    -0.5: "-0.5",
    0.1: "0.1",
    1e23: "1e+23",
    2.0**53 - 1: "9007199254740991",
    2.0**53: "9007199254740992",
    10**23: "1" + 23 * "0",
    Decimal("1.50"): "1.50",
    Decimal("1E+3"): "1000",
}


@pytest.mark.parametrize(("number", "text"), NUMBERS.items())
def test_a_number_is_written_as_short_as_it_reads_back(number: float | Decimal, text: str):
    assert text_of({"answer": number}, "answer", "x:1") == text
    assert type(number)(text) == number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_float_that_is_no_number_is_no_answer(number: float, tmp_path: Path):
    """The word `nan` was trained on."""
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": ["p", "q"], "answer": [1.0, number]}), path)
    with pytest.raises(TaskError, match=rf"d\.parquet\[1\]: field `answer` .*: {number}$"):
        all_problems(Jsonl(path=str(path)))
