"""A learner that waits says for what, and a resumed one whether it repeats what was before."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import redis
from helpers.commands import wait_until
from helpers.fixture_types import Buffers
from helpers.policies import build_group_reader, new_admission
from msgspec.structs import replace
from rich.console import Console

from areal_q.config import External, Run, SingleTurn, load
from areal_q.messages import Group, WorkerStatus
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.runner.live_view import History, PlainView
from areal_q.runner.picture import picture
from areal_q.system.run_dir import METRICS_FILE
from bench.records import make_beat
from buffer.interface import Claims
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from learner.data import group_reader as group_reader_module
from learner.data import starvation
from learner.data.group_reader import WhileWaiting
from learner.data.staleness import VersionHistory
from learner.measure import agent_episodes
from learner.measure.agent_episodes import AgentEpisodes
from learner.measure.replay_check import ReplayCheck
from rollout.commands import cluster

SETTINGS = """
name = "fork"
steps = 24
model = {type = "small", layers = 1, width = 32, heads = 2, kv_heads = 1, mlp = 48, max_positions = 32}
learner = {groups = 4, group_size = 4, max_lag = 1, minibatches = 1, optimizer = {lr = 1e-2}}
rollout = {engine = {type = "torch", slots = 4}, sampling = {max_tokens = 8}}
task = {type = "arithmetic", digits = 1, heldout = 4}
checkpoint = {every = 1000}
eval = {every = 1000, problems = 4}
"""


class Warned(WhileWaiting):
    """Keeps the first warning in `said`, and ends the wait."""

    def __init__(self, said: list[str], stop: threading.Event) -> None:
        self._said, self._stop = said, stop

    def warn(self, step: int, sentence: str) -> None:
        self._said.append(sentence)
        self._stop.set()


def beat(worker: str, waits_for: str) -> WorkerStatus:
    return make_beat(worker, version=4, idle_share=1.0, waits_for=waits_for)


@pytest.mark.parametrize(
    ("held", "met", "end"),
    [
        ({"w0": 12}, True, "12 of them claimed (w0: 12); no heartbeat comes from those that claimed them"),
        ({}, True, "0 of them claimed; no worker is alive"),
        ({}, False, "0 of them claimed; no worker has reported yet: is one starting?"),
    ],
)  # fmt: skip
def test_no_worker_is_said_to_be_dead_that_holds_a_ticket(
    held: dict[str, int], met: bool, end: str
):
    said = starvation.sentence(20.0, 3, 8, Claims(16, held), [], met)
    assert said == f"no step for 20 s: 3 of 8 groups are ready; 16 tickets are open, {end}"


async def test_a_learner_that_starves_tells_who_holds_its_tickets(
    redis_url: str,
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    monkeypatch.setattr(starvation, "SAY_AFTER_S", 0.05)
    run = make_run("learner.groups=4", "learner.max_lag=1")
    buffer = LearnerBuffer(redis_url, run.name)
    admission = new_admission(run, buffer)
    group_reader = build_group_reader(run, buffer, admission, VersionHistory(3, {0: "a0", 1: "b1"}))
    said: list[str] = []
    stop = threading.Event()
    warned = Warned(said, stop)
    admission.admit(1)
    worker = WorkerBuffer(redis_url, run.name, "node-3-w")
    claims = await worker.claim(3, block_s=0.0)
    told = beat("node-3-w", "version 9, with version 4")
    await worker.heartbeat(replace(told, failure="environment: EnvError: down"))
    await worker.commit(claims[0], make_group(claims[0].ticket))
    assert await asyncio.to_thread(group_reader.take, 1, stop, warned) is None
    with redis.Redis.from_url(redis_url) as client:
        assert cluster._starves(client, run.name) == said
        for claim in claims[1:] + await worker.claim(1, block_s=0.0):
            await worker.commit(claim, make_group(claim.ticket))
        stop.clear()
        assert await asyncio.to_thread(group_reader.take, 1, stop)
        assert cluster._starves(client, run.name) == []
    buffer.close()
    await worker.close()
    assert said[0].startswith("no step for ")
    assert said[0].endswith(
        " s: 1 of 4 groups are ready; 7 tickets are open, 2 of them claimed (node-3-w: 2); "
        "node-3-w waits for version 9, with version 4; "
        "node-3-w failed last by environment: EnvError: down; workers draw 0 tokens/s"
    )
    buffer.close()


@pytest.mark.parametrize(
    ("tokens_per_s", "says"),
    [(168.0, None), (0.0, "workers draw 0 tokens/s"), (None, "no worker has reported yet")],
)
def test_a_wait_is_told_only_if_no_worker_draws(
    make_run: Callable[..., Run],
    buffers: Buffers,
    monkeypatch: pytest.MonkeyPatch,
    tokens_per_s,
    says,
):
    """As in the first evaluation of a large model, which takes longer than SAY_AFTER_S."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    monkeypatch.setattr(starvation, "SAY_AFTER_S", 0.05)
    run, buffer, stop, said = make_run(), buffers.learner(), threading.Event(), []
    reader = build_group_reader(run, buffer, new_admission(run, buffer), VersionHistory(3))
    if tokens_per_s is not None:
        status = replace(beat("w", ""), tokens_per_s=tokens_per_s)

        async def beats() -> None:
            async with buffers.worker() as worker:
                await worker.heartbeat(status)

        asyncio.run(beats())
    if says is None:
        threading.Timer(0.3, stop.set).start()
    assert reader.take(0, stop, Warned(said, stop)) is None
    assert [says in sentence for sentence in said] == ([] if says is None else [True])


def test_open_episodes_are_told_when_they_change(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_episodes, "LOOK_EVERY_S", 0.0)
    beats = [replace(beat("a", ""), episodes=64), replace(beat("b", ""), episodes=8)]
    episodes = AgentEpisodes(External())
    told = {"rollout/episodes": 72, "rollout/open_episodes": 0}
    assert episodes.changed(lambda: beats) == told
    assert episodes.changed(lambda: beats) == {}
    beats[0] = replace(beats[0], open_episodes=3)
    assert episodes.changed(lambda: beats) == told | {"rollout/open_episodes": 3}
    assert AgentEpisodes(SingleTurn()).changed(lambda: beats) == {}


def test_a_warning_is_on_screen_until_the_next_step(tmp_path: Path):
    run = load(None, [f"root={tmp_path}", "name=demo"])
    with MetricsLog(tmp_path / "demo", tensorboard=False) as metrics:
        metrics.write("warning", 4, {}, message="no step for 20 s")
        console = Console(file=StringIO(), width=200)
        view = PlainView(run, console)
        view.start(tmp_path / "demo")
        view.refresh()
        assert "warning: no step for 20 s" in console.file.getvalue()  # pyright: ignore
        history = History(Run(steps=10))
        shown = []
        metrics.write("step", 5, {"reward/mean": 0.0})
        for record in read_metrics(tmp_path / "demo" / METRICS_FILE):
            history.add(record)
            with console.capture() as captured:
                console.print(picture("demo", history, 1.0))
            shown.append("no step for 20 s" in captured.get())
    assert shown == [True, False]


def test_a_replay_is_exact_until_the_first_weights_that_differ(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    check = ReplayCheck(40, {39: "x", 40: "y", 41: "a", 42: "b", 43: "c"})
    assert check.metrics() == {}
    for version, digest in [(40, "y"), (41, "a"), (42, "other"), (43, "c"), (44, "d")]:
        check.compare(version, digest)
    assert check.metrics() == {"learner/replay_exact_steps": 1, "learner/replay_differs_at": 42}
    assert "replay differs at step 42" in caplog.text
    exact = ReplayCheck(40, {41: "a", 43: "c"})
    for version, digest in [(40, "y"), (41, "a"), (42, "b"), (43, "c")]:
        exact.compare(version, digest)
    assert "replay is exact up to step 43" in caplog.text
    assert exact.metrics() == {"learner/replay_exact_steps": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_resumed_with_other_arithmetic_goes_on(
    redis_url: str, tmp_path: Path, short_dir: Path
):
    """As on a node with another processor: the same steps give other bits. The only worker has room for two
    groups, and more tickets of the abandoned history than that are open."""
    (tmp_path / "base.toml").write_text(SETTINGS)
    metrics = tmp_path / "fork" / METRICS_FILE
    plain = os.environ | {"REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"}

    def start(name: str, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", *args]
            return subprocess.Popen(command, env=plain | environment, stdout=log, stderr=log)

    def learn(name: str, last: int, **environment: str) -> subprocess.Popen[bytes]:
        args = ["learner", "--config", str(tmp_path / "base.toml"), f"root={tmp_path}"]
        args.append(f"steps={last}")
        sockets = [f"broadcast.{kind}=ipc://{short_dir}/{kind}" for kind in ("announce", "fetch")]
        return start(name, *args, *sockets, **environment)

    def steps() -> int:
        records = read_metrics(metrics) if metrics.exists() else []
        return max((r["step"] for r in records if r["kind"] == "step"), default=0)

    def said() -> list[str]:
        return [log.read_text()[-2000:] for log in tmp_path.glob("*.log")]

    children = [learn("first", 1_000_000), start("w0", "rollout", "--run", "fork", "--id", "w0")]
    try:
        first_checkpoint = metrics.parent / "checkpoints" / "step-000000"
        wait_until(lambda: steps() >= 12 and first_checkpoint.exists(), said, *children)
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()
        last = steps() + 4
        children = [
            learn("second", last, ATEN_CPU_CAPABILITY="default"),
            start("w1", "rollout", "--run", "fork", "--id", "w1"),
        ]
        assert children[0].wait() == 0, (tmp_path / "second.log").read_text()
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert steps() == last
    assert "replay " in (tmp_path / "second.log").read_text()
