"""Evaluations during a run, over the buffer in memory: complete with what can still be answered."""

import asyncio
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.tasks import build_task, build_tokenizer
from bench.stability.memory_buffer import MemoryBuffer
from learner.data.admission import Admission, AdmissionSettings
from learner.heldout_eval import HeldOutEvaluation


@pytest.fixture
def store() -> MemoryBuffer:
    return MemoryBuffer("run")


@pytest.fixture
def metrics(tmp_path: Path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        yield log


@pytest.fixture
def heldout(make_run, store: MemoryBuffer, metrics: MetricsLog, monkeypatch) -> HeldOutEvaluation:
    run = make_run("eval.problems=3")
    learner, tokenizer = store.learner(), build_tokenizer(run.model, run.task)
    admission = Admission(
        AdmissionSettings.of(run), build_task(run.task), tokenizer, learner, 0, set()
    )
    # The answers' tokens are of no vocabulary.
    monkeypatch.setattr(tokenizer, "decode", str)
    return HeldOutEvaluation(admission, learner, tokenizer, metrics)


async def answer(store: MemoryBuffer, make_group, poison: set[int]) -> None:
    """A worker that answers every open ticket but those numbers, which it sets aside."""
    worker = store.worker("w")
    for claim in await worker.claim(100, block_s=0.0):
        if claim.ticket.number in poison:
            await worker.quarantine(claim, "its prompt is too long")
        else:
            await worker.commit(claim, make_group(claim.ticket))


def evaluations(tmp_path: Path) -> dict[int, float]:
    records = read_metrics(tmp_path / "metrics.jsonl")
    return {r["step"]: r["eval/problems"] for r in records if r["kind"] == "eval"}


def test_an_evaluation_ends_without_quarantined_tickets(heldout, make_group, store, tmp_path):
    heldout.ask(0)
    asyncio.run(answer(store, make_group, poison={1}))

    heldout.finish(threading.Event(), timeout_s=600.0)

    assert evaluations(tmp_path) == {0: 2}


def test_an_evaluation_waits_for_its_open_tickets(
    heldout, make_group, store, tmp_path, monkeypatch
):
    monkeypatch.setattr("learner.heldout_eval.LOOK_S", 0.0)
    heldout.ask(0)
    asyncio.run(answer(store, make_group, poison={0}))
    heldout.ask(10)

    heldout.collect()
    heldout.collect()
    assert evaluations(tmp_path) == {0: 2}

    asyncio.run(answer(store, make_group, poison=set()))
    heldout.collect()
    assert evaluations(tmp_path) == {0: 2, 10: 3}


def test_an_answer_without_a_score_is_neither_right_nor_wrong(heldout, make_group, store, tmp_path):
    async def fail() -> None:
        worker = store.worker("w")
        for claim in await worker.claim(100, block_s=0.0):
            group = make_group(claim.ticket)
            failed = {"valid": False, "failure": "exception", "reward": 0.0, "reward_parts": {}}
            trajectories = [replace(t, **failed) for t in group.trajectories]
            await worker.commit(claim, replace(group, trajectories=trajectories))

    heldout.ask(0)
    asyncio.run(fail())
    heldout.collect()

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert [sample["correct"] for sample in record["samples"]] == [None] * 3
    assert record["eval/invalid"] == 3 and "eval/accuracy" not in record
