"""A run at work, a learner and a worker, while a foreign hand puts mutated records at all of their borders.

`make fuzz` has the decoders alone; here what they take goes on into pool, step, logs, engine and metrics."""

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import run_here
from helpers.fixture_types import MakeRun

from areal_q.config import Run
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE, claimed, has_checkpoint
from bench.chaos.foreign_hand import ForeignHand
from buffer.logs.trajectory_log import iter_log
from buffer.weight_sync import WeightSource
from learner.build import build_learner
from learner.loop import Learner
from learner.replay import cli as replay
from rollout.build import EndpointAddress, serve
from rollout.commands.cluster import gather

STEPS = 6
SETTINGS = (
    "learner.groups=2",
    "learner.minibatches=1",
    "learner.max_lag=3",
    "checkpoint.every=2",
    "eval.every=2",
    "eval.problems=4",
    "rollout.engine.slots=8",
    "warmstart.steps=0",
)


@contextmanager
def learner_of(run: Run, directory: Path, url: str, sockets: Path) -> Iterator[Learner]:
    """Yields the run's learner, which resumes if there is something to go on with."""
    announce, fetch = (f"ipc://{sockets}/{end}" for end in ("announce", "fetch"))
    resume = has_checkpoint(directory)
    made = build_learner(run, directory, url, announce, fetch, resume, threading.Event())
    try:
        yield made
    finally:
        made.close()


def follow(learner: Learner, hand: ForeignHand) -> Learner:
    """Lets the hand act within each step: however fast the run is, the step's own groups are there."""
    report = learner.report

    def act_and_report(*args: Any, **named: Any) -> None:
        hand.act()
        report(*args, **named)

    learner.report = act_and_report
    return learner


async def train(learner: Learner, url: str, hand: ForeignHand) -> int:
    """Trains to the end, with a worker, while the foreign hand acts. Returns the step reached. The worker
    comes once the hand has taken a ticket: a fast one leaves none."""
    name, stop = learner.run.name, threading.Event()
    work: asyncio.Task[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(learner.train, stop)
        try:
            while not training.done():
                await asyncio.to_thread(hand.act)
                if work is None and hand.done["partial"]:
                    work = asyncio.create_task(
                        serve(
                            url,
                            name,
                            "w",
                            WeightSource(),
                            lambda status: None,
                            EndpointAddress(),
                            60.0,
                        )
                    )
                assert not (work and work.done()), work
                await asyncio.sleep(0.05)
        finally:
            stop.set()
    if work:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return training.result()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1])
async def test_no_record_of_a_foreign_hand_ends_learner_or_worker(
    make_run: MakeRun, redis_url: str, tmp_path: Path, short_dir: Path, seed: int
):
    run, longer = (
        make_run(*SETTINGS, f'root="{tmp_path}"', f"steps={steps}") for steps in (STEPS, 2 * STEPS)
    )
    with claimed(run, resume=False) as (directory, _), redis.Redis.from_url(redis_url) as client:
        hand = ForeignHand(client, run, random.Random(seed))
        with learner_of(run, directory, redis_url, short_dir) as learner:
            assert await train(follow(learner, hand), redis_url, hand) == STEPS
            hand.act()
            assert gather(client, run.name, WeightSource(), silent_s=600.0).version == STEPS
        with learner_of(longer, directory, redis_url, short_dir) as learner:
            assert await train(follow(learner, hand), redis_url, hand) == 2 * STEPS
    assert all(hand.done[kind] for kind in (*hand.SPARING, "end")), hand.done
    file = directory / METRICS_FILE
    steps = [record for record in read_metrics(file) if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [*range(1, 2 * STEPS + 1)]
    assert steps[-1]["buffer/quarantined"] > 0
    assert max(map(len, file.read_bytes().splitlines())) < 100_000
    assert steps[-1]["buffer/duplicates"] > 0
    taken = [g.ticket.number for _, groups in iter_log(directory / "trajectories") for g in groups]
    assert len(taken) == len({*taken}) == 2 * STEPS * run.learner.groups
    replayed = run_here("replay", replay.main, str(directory))
    assert replayed.returncode == 0 and "bit for bit" in replayed.stdout, replayed
