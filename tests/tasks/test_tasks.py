"""Problems and rewards of the built-in tasks."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config import (
    Arithmetic,
    Calculator,
    Choice,
    Countdown,
    Gsm8k,
    Jsonl,
    Math,
    Python,
    ReasoningGym,
    Run,
    SingleTask,
    TaskConfig,
    ToolCalculator,
    VerifiersTask,
    dump_toml,
    load,
    parse,
)
from areal_q.errors import TaskError
from areal_q.tasks import (
    GRADERS,
    TASKS,
    Problem,
    answer_of,
    build_task,
    permute,
    problem_at,
)
from areal_q.tasks.datasets.calculator import CalculatorTask, parse_number

ALL_CONFIGS = [
    Arithmetic(),
    Calculator(path="x"),
    Choice(path="x"),
    Countdown(),
    Gsm8k(path="x"),
    Jsonl(path="x"),
    Math(path="x"),
    Python(path="x"),
    ReasoningGym(dataset="x"),
    ToolCalculator(),
]
QUICK = [c for c in ALL_CONFIGS if c.grader in GRADERS and not GRADERS[c.grader].slow]


def write(path: Path, answers: Iterable[str]) -> str:
    lines = [json.dumps({"question": f"Q{i}?", "answer": a}) for i, a in enumerate(answers)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def gsm8k_file(tmp_path: Path) -> str:
    return write(tmp_path / "train.jsonl", [f"It is {i}+1.\n#### {i + 1}" for i in range(10)])


def test_tasks_import_no_torch_and_no_transformers() -> None:
    code = "import sys, areal_q.tasks; print({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_every_task_config_has_a_builder_and_a_grader() -> None:
    assert set(TASKS) == set(SingleTask.__args__) == {VerifiersTask, *map(type, ALL_CONFIGS)}
    assert {c.grader for c in ALL_CONFIGS} - {"python"} <= set(GRADERS)


FRAGMENTS = [
    "\\boxed{",
    "}",
    "{",
    "####",
    "Answer: ",
    "(",
    ")",
    "<answer>",
    "</answer>",
    "1",
    "-",
    "/",
    "0",
    "=",
    "C",
]


@pytest.mark.parametrize("cfg", QUICK, ids=lambda c: type(c).__name__)
@given(response=st.text() | st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_a_quick_score_never_raises_and_is_0_or_1(cfg: TaskConfig, response: str) -> None:
    score = GRADERS[cfg.grader].score(Problem("1+1=", "2"), response)
    assert score.reward == float(score.correct)
    # What is right is one answer, in one spelling.
    if score.correct:
        assert answer_of(cfg)(response) == answer_of(cfg)("2")


# Arithmetic


def test_arithmetic_holds_out_pairs_in_both_orders() -> None:
    task = build_task(Arithmetic(digits=1, heldout=20))

    def pairs(problems: Sequence[Problem]) -> set[tuple[int, int]]:
        return {(int(p.prompt[0]), int(p.prompt[2])) for p in problems}

    train, heldout = pairs(task.train), pairs(task.heldout)
    assert (len(task.heldout), len(task.train)) == (20, 90)
    assert not train & {pair for a, b in heldout for pair in ((a, b), (b, a))}
    assert train | heldout == {(a, b) for a in range(10) for b in range(10)}


@pytest.mark.parametrize("reverse", [True, False])
def test_arithmetic_answers_are_the_sums(reverse: bool) -> None:
    task = build_task(Arithmetic(digits=2, reversed=reverse))
    for p in task.train[:500]:
        a, b = map(int, p.prompt.rstrip("=").split("+"))
        assert int(p.answer[::-1] if reverse else p.answer) == a + b
        assert len(p.answer) == len(str(a + b))


def test_arithmetic_holds_out_the_same_problems_every_time() -> None:
    assert [*build_task(Arithmetic()).heldout] == [*build_task(Arithmetic()).heldout]


def test_arithmetic_of_many_digits_costs_no_memory() -> None:
    task = build_task(Arithmetic(digits=9))
    assert len(task.train) == 9 * 10**8 * (9 * 10**8 + 1) - 512
    assert len(problem_at(task, 10**17, seed=1).prompt) > 10


def test_arithmetic_slices_like_a_list() -> None:
    task = build_task(Arithmetic(digits=1, heldout=20))
    assert [*task.heldout[5:9]] == [*task.heldout][5:9]
    assert [*task.heldout[:256]] == [*task.heldout]


def test_arithmetic_rewards_exactly_the_answer() -> None:
    score = GRADERS[Arithmetic().grader].score
    p = Problem("12+34=", "64")
    assert score(p, "64").correct
    assert not any(score(p, r).correct for r in ("46", "640", "", "6 4", "064"))


def test_arithmetic_with_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(TaskError, match=r"task\.heldout = 512 leaves none of the 110 additions"):
        build_task(Arithmetic(digits=1))


# The order of problems


@given(size=st.integers(1, 300), key=st.lists(st.integers(-(2**70), 2**70), max_size=3))
def test_permute_is_a_permutation(size: int, key: list[int]) -> None:
    assert sorted(permute(i, size, *key) for i in range(size)) == list(range(size))


def test_permute_spreads_neighbours_like_a_random_order() -> None:
    size = 10_000
    places = [permute(i, size, 3) for i in range(size)]
    jumps = [abs(a - b) for a, b in pairwise(places)]
    assert sum(jumps) / len(jumps) == pytest.approx(size / 3, rel=0.05)
    assert sum(a == i for i, a in enumerate(places)) < 10


def test_problems_come_once_an_epoch_in_another_order_each_time() -> None:
    task = build_task(Arithmetic(digits=1, heldout=20))

    def epoch(number: int, seed: int) -> list[Problem]:
        return [problem_at(task, number * 90 + i, seed) for i in range(90)]

    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1), [*task.train]]
    for i, order in enumerate(orders):
        assert {p.prompt for p in order} == {p.prompt for p in task.train}
        assert all(order != other for other in orders[:i])
    assert epoch(1, 0) == orders[1]


# The calculator


def test_calculator_reads_annotations_and_counts_malformed_ones(tmp_path: Path) -> None:
    answers = [
        "He had <<16-3-4=9>>9 and <<9*2 = 18>>, <<1000+1=1,001>>.",
        "<<no number>> <<1+1=>> <<=2>> <<1+x=2>> <<1+1=2=2>> <<1/4=.25>>",
        "<<7*7=49>>49",
    ]
    task = CalculatorTask(Calculator(path=write(tmp_path / "f.jsonl", answers), heldout=0.34))
    assert [*task.train] == [
        Problem("16-3-4=", "9"),
        Problem("9*2=", "18"),
        Problem("1000+1=", "1,001"),
        Problem("1/4=", ".25"),
    ]
    assert [*task.heldout] == [Problem("7*7=", "49")]
    assert task.skipped == 5


def test_calculator_never_trains_on_held_out_prompts(tmp_path: Path) -> None:
    answers = [f"<<{i % 13}+1={i % 13 + 1}>>" for i in range(20)]
    task = build_task(Calculator(path=write(tmp_path / "f.jsonl", answers), heldout=0.1))
    assert {p.prompt for p in task.heldout} == {"5+1=", "6+1="}
    assert {p.prompt for p in task.train} == {f"{i}+1=" for i in range(13)} - {"5+1=", "6+1="}


@pytest.mark.parametrize("response", ["1000.5", "1,000.5", " 1000.50", "+1000.500", "01000.5"])
def test_calculator_accepts_numerically_equal_answers(response: str) -> None:
    assert GRADERS[Calculator(path="x").grader].score(Problem("p", "1000.5"), response).correct


@pytest.mark.parametrize(
    "response", ["", "1000.4", "10005", "1000.5.", "10,00.5", "1e3", "NaN", "٣"]
)
def test_calculator_refuses_other_answers(response: str) -> None:
    assert not GRADERS[Calculator(path="x").grader].score(Problem("p", "1000.5"), response).correct


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9)))
def test_parse_number_reads_what_python_formats(value: Decimal) -> None:
    assert parse_number(f"{value:,.3f}") == value
    assert parse_number(f"{value:f}") == value


def test_a_calculator_file_without_annotations_is_refused(gsm8k_file: str) -> None:
    with pytest.raises(TaskError, match=r"train\.jsonl: no annotation .* to train on"):
        build_task(Calculator(path=gsm8k_file))


# GSM8K


def test_gsm8k_holds_out_the_last_share_of_the_questions(gsm8k_file: str) -> None:
    task = build_task(Gsm8k(path=gsm8k_file, heldout=0.2, template="plain"))
    assert task.heldout == (
        Problem("Question: Q8?\nAnswer:", "9"),
        Problem("Question: Q9?\nAnswer:", "10"),
    )
    assert len(task.train) == 8


def test_gsm8k_does_not_train_on_a_held_out_question(tmp_path: Path) -> None:
    row = json.dumps({"question": "same?", "answer": "#### 1"})
    other = json.dumps({"question": "other?", "answer": "#### 2"})
    (tmp_path / "f.jsonl").write_text("\n".join([row, other, row]))
    task = build_task(Gsm8k(path=str(tmp_path / "f.jsonl"), heldout=0.3))
    assert [p.answer for p in task.train] == ["2"]
    assert [p.answer for p in task.heldout] == ["1"]


def test_gsm8k_rewards_the_right_final_number_only() -> None:
    score = GRADERS[Gsm8k(path="x").grader].score
    p = Problem("q", "1,200")
    assert score(p, "First 3, then #### $1200.00").reward == 1.0
    assert score(p, "The answer is 1,200 dollars.").reward == 1.0
    assert score(p, "1200, no: 1201").reward == 0.0
    assert score(p, "many").reward == 0.0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "q"}', "answer is missing"),
        ('{"question": 3, "answer": "#### 3"}', "question = 3: must be text"),
        ('{"question": "q", "answer"', "it ends too early; it takes JSON lines"),
        ('{"question": "q", "answer": 1e400}', "answer = 1e400: is too large"),
        ('{"x": [1, {"y": 1e400}], "answer": "#### 3"}', r"x = \[1, .*1e400.*: is too large"),
        ("\udcff", ""),
        ('{"question": "q", "answer": "no mark 3"}', "does not end with a line `#### number`"),
        ('{"question": "q", "answer": "#### none"}', "does not end with a line `#### number`"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: str, complaint: str) -> None:
    good = '{"question": "q", "answer": "#### 1"}'
    path = tmp_path / "bad.jsonl"
    path.write_bytes(f"{good}\n\n{line}\n{good}\n".encode(errors="surrogateescape"))
    with pytest.raises(TaskError, match=rf"bad\.jsonl:3: .*{complaint}"):
        build_task(Gsm8k(path=str(path), heldout=0.5))


def saved(directory: Path, tables: Sequence[pa.Table]) -> None:
    """Writes what save_to_disk of `datasets` writes for one split."""
    directory.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(tables):05}.arrow" for n in range(len(tables))]
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    for name, table in zip(names, tables, strict=True):
        with pa.ipc.new_stream(directory / name, table.schema) as stream:
            stream.write_table(table)


ROWS = [{"question": f'{n}\n"é", ?', "answer": f"#### {n}"} for n in range(10)]


@pytest.fixture
def formats(tmp_path: Path) -> Path:
    """The same rows in every format, and some that cannot be read."""
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "g.parquet")
    pq.write_table(table, tmp_path / "named_otherwise")
    (tmp_path / "g.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "g.json").write_text(json.dumps(ROWS, indent=1))
    pq.write_table(table, tmp_path / "G.PARQUET")
    (tmp_path / "G.JSONL").write_text("\n".join(map(json.dumps, ROWS)))
    for name, mark in (("g.csv", ","), ("g.tsv", "\t"), ("G.CSV", ","), ("G.Tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=mark)
            writer.writeheader()
            writer.writerows(ROWS)
    saved(tmp_path / "one", [table[:4], table[4:]])
    saved(tmp_path / "splits" / "train", [table])
    saved(tmp_path / "splits" / "test", [table[:1]])
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (tmp_path / "only" / "x").parent.mkdir()
    saved(tmp_path / "only" / "dev", [table])
    (tmp_path / "only" / "dataset_dict.json").write_text('{"splits": ["dev"]}')
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("g.jsonl", "g.json", "g.csv", "g.tsv", "g.parquet", "named_otherwise"),
        *("G.JSONL", "G.CSV", "G.Tsv", "G.PARQUET"),
        *("one", "splits", "only", "splits/train"),
    ],
)
def test_rows_are_the_same_in_every_format(formats: Path, name: str) -> None:
    cfg = Gsm8k(path=str(formats / name), template="plain")
    for columns, kept in ((None, ROWS), (("answer",), [{"answer": r["answer"]} for r in ROWS])):
        task = build_task(cfg, columns)
        problems = [*task.train, *task.heldout]
        assert [p.answer for p in problems] == [str(n) for n in range(10)]
        assert all(row["question"] in p.prompt for row, p in zip(ROWS, problems, strict=True))
        assert [json.loads(p.columns) for p in problems] == kept
    assert {p.columns for p in build_task(cfg).train} == {""}
    with pytest.raises(
        TaskError, match=r"no column `label`, which reward.columns names; there are"
    ):
        build_task(cfg, ["label"])


@pytest.mark.timeout(60)
def test_what_the_library_saves_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS[::-1]).select(range(9, -1, -1))
    rows.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        task = build_task(Gsm8k(path=str(tmp_path / name)))
        assert [p.answer for p in task.train] == [str(n) for n in range(9)]


BAD_DATA = {
    "bare/": "bare: a directory that is none of save_to_disk; it takes JSON lines, JSON, CSV",
    "two/dataset_dict.json": "two: which of a, b\\? Name one: .*two/a",
    "torn/state.json": "torn: cannot be read: ",
    "g.parquet": "g.parquet: no Parquet file: ",
    "text.parquet": "text.parquet: no Parquet file: ",
    "TEXT.PARQUET": "TEXT.PARQUET: no Parquet file: ",
    "empty.parquet": "empty.parquet: no Parquet file: ",
    "g.csv": r"g\.csv:3: a row of other than 2 columns",
    "list.json": r"list\.json\[1\]: question is missing",
    "kinds.json": r"kinds\.json\[0\]: question = 3: must be text",
}
BAD_CONTENT = {
    "two/dataset_dict.json": b'{"splits": ["a", "b"]}',
    "torn/state.json": b'{"_data_files": [{}]}',
    "g.parquet": b"PAR1 and no more",
    "text.parquet": b"<html>not found</html>",
    "TEXT.PARQUET": b"<html>not found</html>",
    "empty.parquet": b"",
    "g.csv": b"question,answer\na,b\nc\n",
    "list.json": b'[{"question": "a", "answer": "#### 1"}, {"answer": "#### 1"}]',
    "kinds.json": b'[{"question": 3, "answer": "#### 1"}]',
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_read_are_named_with_their_place(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(BAD_CONTENT[name]) if name in BAD_CONTENT else file.mkdir()
    path = file.parent if "/" in name and name in BAD_CONTENT else file
    with pytest.raises(TaskError, match=BAD_DATA[name]):
        build_task(Gsm8k(path=str(path)))


def test_a_table_s_field_may_be_of_any_length(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text(f"question,answer\n{'a' * 200_000},#### 1\nb,#### 2\n")
    task = build_task(Gsm8k(path=str(tmp_path / "g.csv"), heldout=0.5))
    assert "a" * 200_000 in task.train[0].prompt


def test_a_conversation_is_read_from_parquet_as_from_json_lines(tmp_path: Path) -> None:
    """Parquet has all fields in all messages, empty where a message lacks them."""
    system = {"role": "system", "content": "s", "name": None}
    rows = [
        {"messages": [system, {"role": "user", "content": text}], "answer": "4"}
        for text in ("a", "b")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet")
    task = build_task(Jsonl(path=str(tmp_path / "g.parquet"), template="chat", heldout=0.5))
    assert task.train[0].messages == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    )


def run_holding_out(formats: Path, heldout: str) -> Run:
    """A run of ten rows."""
    given = ["model.type=pretrained", "model.path=m", "task.type=gsm8k"]
    return load(None, [*given, f"task.path={formats / 'g.csv'}", f"task.heldout={heldout}"])


@pytest.mark.parametrize(("heldout", "kept"), [("0.25", 2), ("3", 3), ("1", 1), ("0.1", 1)])
def test_a_share_or_a_number_of_rows_is_held_out(formats: Path, heldout: str, kept: int) -> None:
    run = run_holding_out(formats, heldout)
    for cfg in (run.task, parse(dump_toml(run), "again").task):
        assert [p.answer for p in build_task(cfg).heldout] == [str(n) for n in range(10 - kept, 10)]


@pytest.mark.parametrize("heldout", ["0", "0.0", "10", "11", "1.0"])
def test_none_may_be_held_out_and_none_be_left(formats: Path, heldout: str) -> None:
    with pytest.raises(TaskError, match=f"task.heldout = {heldout} of 10 rows leaves none to"):
        build_task(run_holding_out(formats, heldout).task)


def test_another_file_is_held_out_and_not_trained_on(formats: Path) -> None:
    held = formats / "test.jsonl"
    held.write_text("\n".join(json.dumps(row) for row in (ROWS[3], {**ROWS[4], "question": "new"})))
    task = build_task(Gsm8k(path=str(formats / "g.csv"), heldout=str(held)))
    assert [p.answer for p in task.heldout] == ["3", "4"]
    assert [p.answer for p in task.train] == [str(n) for n in range(10) if n != 3]


def test_a_second_function_gives_what_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def problems(n=2): return [(f'{i}=', str(i)) for i in range(n)]\n"
        "def more(n=2): return [('7=', '7')]\n"
    )
    path = str(tmp_path / "mine.py")
    task = build_task(Python(path=path, heldout=f"{path}:more", settings={"n": 3}))
    assert ([p.answer for p in task.train], [p.answer for p in task.heldout]) == (
        ["0", "1", "2"],
        ["7"],
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_split_that_leaves_a_part_empty_is_refused(gsm8k_file: str, share: float) -> None:
    with pytest.raises(TaskError, match=rf"task\.heldout = {share} of 10 rows leaves none"):
        build_task(Gsm8k(path=gsm8k_file, heldout=share))


@pytest.mark.parametrize("path", ["/nowhere/train.jsonl", "nowhere/train.jsonl", "/"])
def test_a_missing_file_is_named(path: str) -> None:
    with pytest.raises(TaskError, match=f"^{path}: "):
        build_task(Gsm8k(path=path))


def test_a_file_without_rows_is_refused_as_one(tmp_path: Path) -> None:
    empty, other = str(tmp_path / "empty.jsonl"), str(tmp_path / "test.jsonl")
    Path(empty).write_text("\n")
    Path(other).write_text(json.dumps(ROWS[0]))
    for cfg in (Gsm8k(path=empty), Gsm8k(path=empty, heldout=other), Calculator(path=empty)):
        with pytest.raises(TaskError, match=f"^{empty}: there are no rows in it$"):
            build_task(cfg)
