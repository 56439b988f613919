"""The supervised phase: cached by content, stopped early, stopped on request."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.fixture_types import MakeRun
from helpers.policies import initial_model

from areal_q.config import Calculator, Run, load
from areal_q.errors import Stopped
from areal_q.models import Decoder
from areal_q.system import run_dir
from areal_q.tasks import build_task, build_tokenizer
from learner.supervised.warm_start import _key, warm_start

Progress = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def warmed(run: Run, stop: threading.Event | None = None) -> tuple[Decoder, Path | None, Progress]:
    """(model, the directory of the cache that it came from, what was told meanwhile)"""
    told: Progress = []
    tokenizer = build_tokenizer(run.model, run.task)
    model = initial_model(run)
    cached = warm_start(
        model,
        run,
        build_task(run.task),
        tokenizer,
        lambda step, loss: told.append((step, loss)),
        stop or threading.Event(),
    )
    return model, cached, told


def same(one: Decoder, other: Decoder) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_second_call_loads_the_weights_of_the_first(make_run: MakeRun):
    run = make_run("warmstart.steps=3", "warmstart.batch=8")
    first, cached, told = warmed(run)
    assert not cached
    assert [step for step, _ in told] == [0, 3]
    second, cached, told = warmed(run)
    assert cached
    assert told == []
    assert same(first, second)
    assert not same(first, initial_model(run))


def test_a_cache_that_cannot_be_written_costs_the_cache_alone(
    make_run: MakeRun, cache: Path, caplog: pytest.LogCaptureFixture
):
    cache.write_text("a file in the place of the directory")
    run = make_run("warmstart.steps=3", "warmstart.batch=8")
    _, cached, told = warmed(run)
    assert not cached and [step for step, _ in told] == [0, 3]
    assert "cannot be cached for the next run" in caplog.text


def test_same_settings_give_the_same_weights_without_the_cache(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run = make_run("warmstart.steps=2", "warmstart.batch=8")
    first, *_ = warmed(run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    second, cached, _ = warmed(run)
    assert not cached
    assert same(first, second)


@pytest.mark.parametrize(
    "other",
    [
        "seed=1",
        "model.width=64",
        "task.digits=2",
        "task.heldout=30",
        "warmstart.steps=3",
        "warmstart.lr=1e-3",
        "warmstart.batch=9",
        "warmstart.until_accuracy=0.9",
    ],
)
def test_other_settings_are_not_taken_for_these(make_run: MakeRun, other: str):
    settings = ["warmstart.steps=2", "warmstart.batch=8"]
    warmed(make_run(*settings))
    assert not warmed(make_run(*settings, other))[1]
    assert warmed(make_run(*settings, "learner.max_lag=0", "steps=99"))[1]


def test_changed_file_is_not_taken_for_the_old_one(make_run: MakeRun, tmp_path: Path):
    def write(sums: int) -> None:
        lines = [{"question": "", "answer": f"<<{n}+2={n + 2}>>\n#### 1"} for n in range(sums)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    path = tmp_path / "train.jsonl"
    run = make_run("warmstart.steps=2", "warmstart.batch=8")
    run = msgspec.structs.replace(run, task=Calculator(path=str(path), heldout=0.2))
    write(20)
    assert [bool(warmed(run)[1]) for _ in range(2)] == [False, True]
    write(21)
    assert not warmed(run)[1]


def test_a_model_written_again_is_not_taken_for_the_old_one(tmp_path: Path):
    (weights := tmp_path / "model.safetensors").write_bytes(b"old")
    run = load(None, ["model.type=pretrained", f"model.path={tmp_path}", "warmstart.steps=1"])
    task = build_task(run.task)
    before = _key(run, task)
    assert _key(run, task) == before
    weights.write_bytes(b"other")
    assert _key(run, task) != before
    mixed = run_dir.with_changes(run, "learner", router_aux_coef=0.1)
    assert _key(mixed, task) != _key(run, task)


def test_it_stops_at_the_accuracy_that_is_enough(make_run: MakeRun):
    _, _, told = warmed(make_run("warmstart.steps=50", "warmstart.until_accuracy=0"))
    assert [step for step, _ in told] == [0, 50]  # nothing in between: the first step was enough
    assert told[0][1] == told[1][1]


def test_it_is_not_looked_at_where_none_is_enough(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    looks: list[int] = []
    monkeypatch.setattr(
        "learner.supervised.warm_start.share_right",
        lambda _, samples: looks.append(len(samples)) or 0.0,
    )
    warmed(make_run("warmstart.steps=5", "warmstart.batch=8"))
    assert looks == []
    warmed(make_run("warmstart.steps=5", "warmstart.batch=8", "warmstart.until_accuracy=0.5"))
    assert looks == [8, 8, 8]


def test_stop_request_raises_and_leaves_nothing_in_the_cache(make_run: MakeRun, cache: Path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        warmed(make_run("warmstart.steps=50"), stop)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_no_steps_leave_the_model_alone(make_run: MakeRun, cache: Path):
    run = make_run("warmstart.steps=0")
    model, cached, told = warmed(run)
    assert (cached, told) == (None, [])
    assert same(model, initial_model(run))
    assert not cache.exists()


def test_a_torn_file_in_the_cache_is_made_again(make_run: MakeRun, cache: Path):
    run = make_run("warmstart.steps=2", "warmstart.batch=8")
    first, *_ = warmed(run)
    (file,) = cache.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    again, cached, _ = warmed(run)
    assert not cached
    assert same(first, again)
    assert warmed(run)[1]


def test_it_learns(make_run: MakeRun):
    _, _, told = warmed(make_run("warmstart.steps=60", "warmstart.batch=32", "warmstart.lr=1e-2"))
    assert told[-1][1] < told[0][1] / 2


def test_one_process_warms_up_what_several_then_share(make_run: MakeRun, cache: Path):
    """An answer with its prompt has more tokens than one process's third of a micro-batch."""
    usual = ["warmstart.steps=1", "warmstart.batch=8"]
    shared = ["learner.backend.context=3", "learner.microbatch_tokens=3"]
    model, *_ = warmed(make_run(*usual, *shared))
    for file in cache.rglob("*.safetensors"):
        file.unlink()
    expected, cached, _ = warmed(make_run(*usual, "learner.microbatch_tokens=9"))
    assert not cached and same(model, expected)
