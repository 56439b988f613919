"""Commands that look at a run which does not go on: they say how it ended, at once."""

import json
import os
import shutil
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import typer
from rich.console import Console
from typer.testing import CliRunner

from areal_q.config import Run, dump_toml
from areal_q.errors import BufferUnavailable, ConfigError
from areal_q.observability.metrics_log import MetricsLog, Record
from areal_q.observability.run_end import going_on, how_it_ended, note_failure
from areal_q.runner import live_view
from areal_q.system.files import try_lock
from buffer.admin import open_run
from buffer.redis_store.local_server import RedisServer
from buffer.weight_sync.commands import inspect_weights
from rollout.commands import status


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(name="demo", root=str(tmp_path))
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.toml").write_text(dump_toml(run))
    return run


@pytest.fixture
def directory(run: Run, tmp_path: Path) -> Path:
    return tmp_path / "demo"


def record(directory: Path, *kinds: str) -> None:
    with MetricsLog(directory, tensorboard=False) as log:
        for step, kind in enumerate(kinds, 1):
            if kind == "end":
                log.write("end", step - 1, {}, reason="done")
            else:
                log.write("step", step, {})


RECORDS = {
    (): ("ended before its first record; ", False),
    ("step", "step"): ("ended without a word after 2 steps; ", False),
    ("step", "step", "end"): ("ended: done at step 2", True),
}


@pytest.mark.parametrize("kinds", RECORDS)
def test_a_run_that_does_not_go_on_has_ended(directory, kinds):
    record(directory, *kinds)
    told = how_it_ended(directory)
    assert told and told[0].startswith(RECORDS[kinds][0]) and told[1] == RECORDS[kinds][1]
    lock = try_lock(directory)
    assert lock is not None and how_it_ended(directory) is None
    os.close(lock)


def test_a_cluster_may_go_on_elsewhere(directory, monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    record(directory, "step")
    assert how_it_ended(directory) is None
    record(directory, "end")
    assert how_it_ended(directory) == ("ended: done at step 0", True)


def command(main, *arguments: str):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


def test_status_of_an_ended_run_answers_without_asking(directory):
    record(directory, "step", "end")
    told = command(status.main, str(directory))
    assert (told.exit_code, told.stdout) == (0, f"{directory}: ended: done at step 1\n")
    found = json.loads(command(status.main, str(directory), "--json").stdout)
    assert found == {"run": "demo", "ended": "ended: done at step 1", "well": True}


def test_status_of_a_run_that_died_is_wrong(directory):
    record(directory, "step")
    assert command(status.main, str(directory)).exit_code == 1


@pytest.mark.parametrize("option", ["--verify", "--tensors"])
def test_weights_of_an_ended_run_ask_no_port(directory, option):
    record(directory, "step", "end")
    told = command(inspect_weights.main, str(directory), option)
    assert isinstance(told.exception, ConfigError)
    assert str(told.exception).startswith(f"{directory}: ended: done at step 1; nobody serves")


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_of_a_start_that_failed_says_so(run, directory, terminal):
    with open(os.devnull, "w") as null:
        console = Console(record=True, width=200, file=null, force_terminal=terminal)
        live_view.watch(run, directory, console)
    assert "ended before its first record" in console.export_text()


ERROR = "rollout-0 was killed by SIGKILL; the end of logs/rollout-0.log:\n  last\nto go on: …"


@pytest.mark.parametrize("terminal", [True, False])
def test_status_and_watch_repeat_how_a_run_failed(run, directory, terminal):
    """Its learner may have drained before, and have said so."""
    record(directory, "step", "end")
    note_failure(directory, ERROR)
    assert how_it_ended(directory) == (f"ended: {ERROR}", False)
    told = command(status.main, str(directory))
    assert (told.exit_code, told.stdout) == (1, f"{directory}: ended: {ERROR}\n")
    console = Console(record=True, width=200, file=StringIO(), force_terminal=terminal)
    live_view.watch(run, directory, console)
    assert console.export_text().endswith(f"{directory}: ended: {ERROR}\n")
    with MetricsLog(directory, tensorboard=False) as log:
        assert log.rewind(1) == 2  # a resumption forgets it


def history(*accuracies: float, steps: int) -> list[Record]:
    """Evaluations every tenth of `steps` steps."""
    evals = [
        {"kind": "eval", "step": 10 * i, "eval/accuracy": a, "eval/problems": 100.0}
        for i, a in enumerate(accuracies)
    ]
    return [*evals, *({"kind": "step", "step": i} for i in range(1, steps + 1))]


@pytest.mark.parametrize(
    ("accuracies", "steps", "kept", "told"),
    [
        ([0.1, 0.6], 10, [0, 10], []),
        ([0.1, 0.6], 11, [10], ["goes on from the checkpoint of step 10: step 11, logged already"]),
        (
            [0.1, 0.6],
            14,
            [10],
            ["goes on from the checkpoint of step 10: steps 11 to 14, logged a"],
        ),
        ([0.1, 0.6, 0.01], 20, [0, 10, 20], ["--resume --from 10 learner.optimizer.lr=1.5e-05"]),
        (
            [0.1, 0.6, 0.01],
            20,
            [0, 20],
            ["step 0 (eval/accuracy 0.100); to go on from it: Ctrl-C, "],
        ),
        ([0.1, 0.6, 0.01], 20, [20], ["no older checkpoint that is better was kept"]),
        ([0.1, 0.6, 0.01], 20, [10], ["steps 11 to 20, logged already, will be made again"]),
    ],
)
def test_a_resumption_says_what_it_repeats_and_a_way_back(
    run, directory, accuracies, steps, kept, told
):
    for step in kept:
        (directory / "checkpoints" / f"step-{step:06}").mkdir(parents=True)
    found = [*going_on(run, directory, kept[-1], history(*accuracies, steps=steps))]
    assert len(found) == len(told) and all(
        part in said for part, said in zip(told, found, strict=True)
    )


@pytest.mark.parametrize("lost", [False, True])
def test_a_watched_run_that_ends_is_told_as_an_ended_one(
    directory: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
):
    """Its Redis goes before the directory is let go of, or stays, being another's."""
    lock = try_lock(directory)
    assert lock is not None
    record(directory, "step", "end")
    app = typer.Typer()
    app.command()(status.main)
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        turns = iter([server.stop] * lost + [lambda: os.close(lock)])
        monkeypatch.setattr(status, "time", SimpleNamespace(sleep=lambda _: next(turns)()))
        shown = CliRunner().invoke(app, [str(directory), "--watch", "2"])
    assert shown.exit_code == 0, shown.exception
    assert shown.stdout.splitlines()[-1] == f"{directory}: ended: done at step 1"
    assert ("looks again, as the run has not ended" in shown.stderr) == lost


def test_a_redis_that_is_lost_ends_a_watch_of_none_at_work(
    directory: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    app = typer.Typer()
    app.command()(status.main)
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        monkeypatch.setattr(status, "time", SimpleNamespace(sleep=lambda _: server.stop()))
        shown = CliRunner().invoke(app, [str(directory), "--watch", "2"])
    assert isinstance(shown.exception, BufferUnavailable)


def test_a_record_after_the_end_is_of_a_resumed_run(directory):
    history = live_view.History(Run(steps=5))
    for kind in ("end", "step"):
        history.add({"kind": kind, "step": 1, "elapsed_s": 1.0})
    assert history.end is None


def test_the_buffer_of_a_read_only_run_is_looked_at(directory, short_dir, monkeypatch):
    with (
        RedisServer.start(directory / "redis", short_dir / "redis") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        client.set("areal-q:demo:cursor", 3)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    monkeypatch.setattr(open_run.os, "access", lambda path, mode: False)
    with open_run.open_run(directory, None, None) as (client, name):
        assert client.get("areal-q:demo:cursor") == b"3" and name == "demo"
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    shutil.rmtree(directory)
