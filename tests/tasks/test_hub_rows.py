"""Data sets of the Hugging Face Hub, `org/name[:config][/split][@revision]`, wherever rows are read."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_q.config import Sft, load
from areal_q.config.tasks import Calculator, Choice, Gsm8k, Jsonl, Math
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import asked_of, build_task
from areal_q.tasks.datasets.row_files import is_columnar, is_on_hub, read_objects
from learner.supervised.demonstrations import read_demonstrations

ROW = {
    "prompt": "{}+0?", "question": "{}+0?", "problem": "{}+0?", "options": ["{}", "none"],
    "answer": "<<{}+0={}>>\n#### {}", "answerKey": "A",
}  # fmt: skip
"""A row that each of the tasks reads"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `datasets` was asked for; it has ten rows of everything, other ones in another split."""
    found: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str, revision: str = "") -> list[Any]:
        found.append((name, config, split, revision))
        numbers = range(10) if split == "train" else range(100, 110)
        return [
            {k: [o.format(n) for o in v] if isinstance(v, list) else v.replace("{}", str(n))
             for k, v in ROW.items()}
            for n in numbers
        ]  # fmt: skip

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return found


@pytest.mark.parametrize("task", [Gsm8k, Math, Choice, Jsonl, Calculator])
def test_every_task_of_rows_reads_the_hub(task: Callable[..., Any], asked: list[Any]):
    built = build_task(task(path="org/name:one/more@v1.0", heldout=0.2))
    assert (len(built.train), len(built.heldout)) == (8, 2)
    assert asked == [("org/name", "one", "more", "v1.0")]


@pytest.mark.parametrize("task", [Gsm8k, Math, Choice, Jsonl])
def test_held_out_rows_may_be_another_split(task: Callable[..., Any], asked: list[Any]):
    built = build_task(task(path="org/name", heldout="org/name/test"))
    assert (len(built.train), len(built.heldout)) == (10, 10)
    assert asked == [("org/name", None, "train", ""), ("org/name", None, "test", "")]


def test_sets_sources_and_demonstrations_read_the_hub(asked: list[Any]):
    run = load(
        None,
        [
            "task.type=mix",
            *(f"task.sources.{n}.task={{type='jsonl', path='{n}/{n}'}}" for n in "ab"),
            "eval.sets.far={task={type='jsonl', path='c/c/test'}}",
        ],
    )
    assert len(build_task(run.task).train) == 18
    assert len(asked_of(run.of("far").task)) == 10
    read = read_demonstrations(Sft(path="d/d", heldout="e/e/test", template="plain"))
    assert (len(read.train), len(read.heldout)) == (10, 10)
    assert [(name, split) for name, _, split, _ in asked] == [
        *(("a/a", "train"), ("b/b", "train"), ("c/c", "test"), ("d/d", "train"), ("e/e", "test"))
    ]


@pytest.mark.parametrize(
    ("path", "read"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "main", "train", "")),
        ("openai/gsm8k:socratic/test", ("openai/gsm8k", "socratic", "test", "")),
        ("a/b", ("a/b", None, "train", "")),
        ("a/b:2023.en", ("a/b", "2023.en", "train", "")),
        ("a/b/test[:100]", ("a/b", None, "test[:100]", "")),
        ("a/b@refs/pr/1", ("a/b", None, "train", "refs/pr/1")),
        ("a-1/b.c_d:e/f@0a1b", ("a-1/b.c_d", "e", "f", "0a1b")),
    ],
)
def test_config_split_and_revision_are_in_the_name(path: str, read: Any, asked: list[Any]):
    assert read_objects(path)[3][0] == f"{path}[3]" and asked == [read]
    assert is_columnar(path)


@pytest.mark.parametrize(
    "path",
    [
        "a/b.jsonl",
        "a/b.JSONL",
        "a/b/C.CSV",
        "a/b/c.csv",
        "./a/b",
        "/a/b",
        "a",
        "a/b/c/d",
        "here/it",
        "here/it/test",
    ],
)
def test_a_path_is_none_of_the_hub(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one of which only the beginning is there: its end is missing here, not on the Hub."""
    (tmp_path / "here" / "it").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_on_hub(path)
    with pytest.raises(TaskError, match=f"^{path}: ((?!Hub).)*$"):
        read_objects(path)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach it\nsecond line"),
        ValueError("Couldn't reach it"),
        RuntimeError("Couldn't reach it"),
        Exception("Couldn't reach it"),
    ],
)
def test_what_cannot_be_loaded_says_how_to_bring_it_here(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    call = r"load_dataset\('a/b', 'c', split='train', revision='d'\)\.save_to_disk\('DIR'\)"
    with pytest.raises(TaskError, match=rf"^a/b:c@d: no such file, .*reach it.*{call}, .* DIR"):
        build_task(Jsonl(path="a/b:c@d"))


@pytest.mark.parametrize("task", [Gsm8k, Math, Choice, Jsonl, Calculator])
def test_without_datasets_the_extra_is_named(
    task: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"^a/b: no such file; .*pip install .*\[hf\]"):
        build_task(task(path="a/b"))
