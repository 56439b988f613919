"""What a learner does before each poll for groups, while its first step waits."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from areal_q.config import Run
from areal_q.messages import Array, Group
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE
from bench.records import make_beat
from buffer.redis_store import WorkerBuffer
from buffer.sampling.replay_pool import SampledGroups
from learner import heldout_eval
from learner.build import build_learner
from learner.measure import buffer_metrics


def in_vocabulary(group: Group) -> Group:
    ids = [Array.of(t.response_ids.numpy() % 20, "int32") for t in group.trajectories]
    pairs = zip(group.trajectories, ids, strict=True)
    return replace(group, trajectories=[replace(t, response_ids=i) for t, i in pairs])


def test_an_evaluation_is_told_and_read_before_a_step(
    redis_url: str,
    make_run: Callable[..., Run],
    make_group: Callable[..., Group],
    tmp_path: Path,
    short_dir: Path,
    monkeypatch,
):
    monkeypatch.setattr(heldout_eval, "TELL_EVERY_S", 0.0)
    run = make_run("eval.problems=3", "warmstart.steps=0")
    announce, fetch = f"ipc://{short_dir}/announce", f"ipc://{short_dir}/fetch"
    learner = build_learner(run, tmp_path, redis_url, announce, fetch, False, threading.Event())

    async def answer() -> None:
        """Answers the evaluation's tickets and no other."""
        worker = WorkerBuffer(redis_url, run.name, "w")
        for claim in await worker.claim(100, block_s=0.0):
            if claim.ticket.purpose == "eval":
                await worker.commit(claim, in_vocabulary(make_group(claim.ticket)))
        await worker.close()

    def told() -> list[str]:
        records = read_metrics(tmp_path / METRICS_FILE)
        return [r["doing"] for r in records if r["kind"] == "start" and "of" in r["doing"]]

    try:
        learner.evaluate(0)
        learner.look()
        assert told() == ["evaluating: 0 of 3 problems"]
        asyncio.run(answer())
        learner.look()
        [record] = [r for r in read_metrics(tmp_path / METRICS_FILE) if r["kind"] == "eval"]
        assert (record["step"], record["eval/problems"]) == (0, 3)
        assert learner.step == 0 and len(told()) == 1
    finally:
        learner.close()


def test_a_first_step_says_what_is_still_evaluated(
    redis_url: str, make_run: Callable[..., Run], tmp_path: Path, short_dir: Path, monkeypatch
):
    """No answer is read while it computes, which was a silence of a minute."""
    run = make_run("eval.problems=3", "warmstart.steps=0")
    announce, fetch = f"ipc://{short_dir}/announce", f"ipc://{short_dir}/fetch"
    learner = build_learner(run, tmp_path, redis_url, announce, fetch, False, threading.Event())

    def step(*_):
        records = read_metrics(tmp_path / METRICS_FILE)
        raise InterruptedError([r["doing"] for r in records if r["kind"] == "start"][-1])

    monkeypatch.setattr(learner.group_reader, "take", lambda *_, **__: SampledGroups([], []))
    monkeypatch.setattr("learner.loop.train_step", step)
    try:
        with pytest.raises(InterruptedError, match="first step, and evaluating: 0 of 3 problems"):
            learner.take_steps(threading.Event())
    finally:
        learner.close()


def test_a_failing_reward_is_told_before_its_groups_are_read(
    redis_url: str, make_run: Callable[..., Run], tmp_path: Path, short_dir: Path, monkeypatch
):
    """By the heartbeats, once, and again for ten times as many responses."""
    monkeypatch.setattr(buffer_metrics, "LOOK_EVERY_S", 0.0)
    run = make_run("warmstart.steps=0")
    announce, fetch = f"ipc://{short_dir}/announce", f"ipc://{short_dir}/fetch"
    learner = build_learner(run, tmp_path, redis_url, announce, fetch, False, threading.Event())

    async def beat(failure: str) -> None:
        worker = WorkerBuffer(redis_url, run.name, "w")
        await worker.heartbeat(make_beat("w", failure=failure))
        await worker.close()

    def told() -> list[tuple[float, str]]:
        records = read_metrics(tmp_path / METRICS_FILE)
        failing = [r for r in records if r["kind"] == "failing"]
        return [(r["buffer/reward_errors"], r["workers"][0]["failure"]) for r in failing]

    try:
        asyncio.run(beat(""))
        learner.look()
        assert told() == []
        asyncio.run(beat("took too long"))
        for errors in (0, 9, 10, 99, 100):
            learner.group_reader.failures.errors = errors
            learner.look()
        assert told() == [(float(n), "took too long") for n in (0, 10, 100)]
    finally:
        learner.close()
