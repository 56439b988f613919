"""Processes that end at any point of the protocol, are killed, stopped and started again; memory over time."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from helpers.commands import stretched
from helpers.forked import Child, Nursery, version_of
from helpers.weight_sync import WeightSync, arrive, await_true, await_version, collect

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import FetchDeltas

CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=0.5)
SMALL = msgspec.structs.replace(CONFIG, chunk_bytes=4096, credit=2)
LAST = 3
"""Versions that a learner publishes"""

HANDLER = "buffer.weight_sync.request_handler"
SERVER = "buffer.weight_sync.server"
SUBSCRIBER = "buffer.weight_sync.subscriber"
FETCHER = "buffer.weight_sync.fetcher"
CHUNKS = "buffer.weight_sync.chunks"
LATEST = "buffer.weight_sync.latest"
VERSION = "areal_q.weights.version"
DELTA = "areal_q.weights.delta"

ENDS_OF_A_LEARNER = {
    "before the first version is visible": (HANDLER, "RequestHandler.add_version", "before", 1),
    "after it is visible, before it is announced": (HANDLER, "RequestHandler.add_version", "after", 1),
    "after the announcement": (SERVER, "WeightServer._announce_if_due", "after", 2),
    "before the answer to a newcomer": (HANDLER, "RequestHandler._reply", "before", 1),
    "between manifest and chunks": (HANDLER, "RequestHandler._reply", "after", 1),
    "before the first chunk": (HANDLER, "RequestHandler._send_chunk", "before", 1),
    "in the middle of the chunks": (HANDLER, "RequestHandler._send_chunk", "after", 3),
    "after the last chunk": (HANDLER, "RequestHandler._send_chunk", "after", 6),
    "while a delta is made": (DELTA, "diff", "before", 1),
    "after a delta is made, before it is sent": (DELTA, "diff", "after", 1),
    "after a delta is sent, before it is announced": (HANDLER, "RequestHandler.add_version", "after", 2),
    "before missed deltas are offered": (HANDLER, "RequestHandler._catch_up", "before", 1),
    "after missed deltas are offered": (HANDLER, "RequestHandler._catch_up", "after", 1),
}  # fmt: skip

ENDS_OF_A_WORKER = {
    "before it connects": (SUBSCRIBER, "WeightSubscriber._subscribe", "before", 1),
    "at the first announcement": (SUBSCRIBER, "WeightSubscriber._on_broadcast", "before", 1),
    "after it asked for the manifest": (FETCHER, "Fetcher._ask", "after", 1),
    "when the manifest is there": (FETCHER, "Fetcher._begin", "before", 1),
    "after it asked for chunks": (FETCHER, "Fetcher._begin", "after", 1),
    "before the first chunk": (CHUNKS, "ChunkBuffer.receive", "before", 1),
    "in the middle of the chunks": (CHUNKS, "ChunkBuffer.receive", "after", 3),
    "before the last chunk is verified": (VERSION, "Verifier.advance", "before", 6),
    "after a snapshot is verified": (VERSION, "Verifier.finish", "after", 1),
    "before it is handed over": (LATEST, "LatestValue.put", "before", 1),
    "after it is handed over": (LATEST, "LatestValue.put", "after", 1),
    "when the engine has it, before the swap": (LATEST, "LatestValue.take", "after", 2),
    "before a delta is applied": (DELTA, "apply", "before", 1),
    "in the middle of a delta": (DELTA, "unpack_unnamed", "before", 1),
    "after a delta is applied": (DELTA, "apply", "after", 1),
    "after a delta is handed over": (LATEST, "LatestValue.put", "after", 2),
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


class Processes:
    """Learners and workers of one test in processes of their own, at the endpoints of `sync`."""

    def __init__(self, nursery: Nursery, sync: WeightSync) -> None:
        self._nursery, self._sync = nursery, sync

    def learner(
        self, epoch: str, *, where=None, last: int = LAST, pause_s: float = 0.05, size: int = 24_000
    ) -> Child:
        return self._start("learner", where, epoch=epoch, last=last, pause_s=pause_s, size=size)

    def worker(self, *, where=None, ready: bool = True, **options: Any) -> Child:
        made = self._start("worker", where, **{"silence_s": 0.5} | options)
        if ready:
            made.says("ready")
        return made

    def _start(self, role: str, where, **options: Any) -> Child:
        sync = self._sync
        settings = msgspec.to_builtins(sync.config)
        return self._nursery.start(sync.stack, role, sync.at(), settings, where, **options)


@pytest.fixture
def processes(nursery: Nursery, sync: WeightSync) -> Processes:
    return Processes(nursery, sync)


@pytest.mark.parametrize("point", ENDS_OF_A_LEARNER)
def test_a_learner_that_ends_anywhere_is_followed_again(
    sync: WeightSync, processes: Processes, point: str
) -> None:
    sync.config = SMALL
    subscriber = sync.follow(sync.at())
    first = processes.learner("a", where=ENDS_OF_A_LEARNER[point])
    if first.says("ended", "published all") != "ended":  # nobody was behind: somebody who is asks
        base = version_of(1, "a").manifest
        dealer = sync.socket(zmq.DEALER, sync.at().fetch)
        dealer.send(messages.encode(FetchDeltas(epoch="a", base=1, base_digest=base.digest)))
        first.says("ended")
    processes.learner("b")
    arrive(subscriber, version_of(LAST, "b"))
    assert subscriber.stats.mismatches == subscriber.stats.fetch.mismatches == 0


@pytest.mark.parametrize("point", ENDS_OF_A_WORKER)
def test_a_worker_that_ends_anywhere_disturbs_nobody(
    sync: WeightSync, processes: Processes, point: str
) -> None:
    sync.config = SMALL
    other = sync.follow(timeout_s=60.0)
    sync.server.publish(version_of(1, "a"))
    arrive(other, version_of(1, "a"))
    first = processes.worker(where=ENDS_OF_A_WORKER[point], ready=False)
    if "delta" in point:
        first.says("has 1 ")
        sync.server.publish(version_of(2, "a"))
    first.says("ended")
    newest = version_of(LAST, "a")
    sync.server.publish(newest)
    arrive(other, newest)
    processes.worker().says(f"has {LAST} {newest.manifest.digest}")
    assert other.stats.fetch.fetches == 1 and other.stats.fetch.retries == 0
    assert other.stats.mismatches == other.stats.fetch.mismatches == 0


def test_a_worker_killed_while_it_fetches_disturbs_nobody(
    sync: WeightSync, processes: Processes
) -> None:
    subscriber = sync.follow()
    arrive(subscriber, sync.publish(1, rows=100_000))
    before = sync.server.stats.chunks
    sync.config = msgspec.structs.replace(CONFIG, chunk_bytes=200)
    victim = processes.worker()  # 40,000 chunks: far from done when it is killed
    await_true(lambda: sync.server.stats.chunks >= before + 10)
    victim.kill()
    assert sync.server.stats.chunks - before < 40_000
    arrive(subscriber, sync.publish(2, rows=100_000))
    sync.config = CONFIG
    processes.worker().says("has 2 ")


@pytest.mark.parametrize(
    ("stopped", "others", "versions"),
    [(1, 1, 60), pytest.param(6, 10, 40, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_a_stopped_worker_holds_up_nobody_and_catches_up(
    sync: WeightSync, processes: Processes, stopped: int, others: int, versions: int
) -> None:
    peer_timeout_s = stretched(2.0)
    sync.server = sync.serve(peer_timeout_s=peer_timeout_s)
    subscribers = [sync.follow() for _ in range(others)]
    workers = [processes.worker() for _ in range(stopped)]
    sync.bring(0, *subscribers)
    for worker in workers:
        worker.says("has 0 ")
        worker.send(signal.SIGSTOP)
    for number in range(1, versions):
        sync.bring(number, *subscribers)
    for subscriber in subscribers:
        assert subscriber.stats.fetch.fetches == 1, "the other workers lost no delta"
    time.sleep(1.25 * peer_timeout_s)  # long enough for ZeroMQ to give the stopped peers up
    for worker in workers:
        worker.send(signal.SIGCONT)
    sync.bring(versions, *subscribers)
    for worker in workers:
        worker.says(f"has {versions} ")


@pytest.mark.timeout(60)
def test_a_worker_that_is_given_up_while_it_is_busy_goes_on(
    sync: WeightSync, processes: Processes
) -> None:
    """A full queue, a ping behind it and a peer that hangs up: libzmq 4.3.5 aborts there."""
    sync.server = sync.serve(peer_timeout_s=1.0)
    worker = processes.worker(busy_s=4.0, silence_s=10.0)
    sync.publish(0)
    worker.says("got 0 ")
    worker.send(signal.SIGSTOP)
    for number in range(1, 60):
        sync.server.publish(sync.version(number))
        time.sleep(0.01)
    time.sleep(1.5)
    worker.send(signal.SIGCONT)
    worker.says("got 59 ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_killed_and_started_again_is_followed(
    sync: WeightSync, processes: Processes
) -> None:
    subscriber = sync.follow(sync.at())
    for epoch in ("a", "b", "c"):
        learner = processes.learner(epoch, last=10**6, pause_s=0.002, size=1 << 20)
        seen = collect(
            subscriber, lambda v, e=epoch: v.manifest.epoch == e and v.manifest.version > 5
        )[-1]
        arrived = version_of(seen.manifest.version, epoch, 1 << 20)
        assert seen.manifest.digest == arrived.manifest.digest
        learner.kill()
    assert subscriber.stats.epochs == 3
    assert subscriber.stats.fetch.mismatches == subscriber.stats.mismatches == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc"
)
def test_memory_does_not_grow_over_a_thousand_versions(
    sync: WeightSync, processes: Processes
) -> None:
    sync.server = sync.serve(peer_timeout_s=2.0)
    subscriber = sync.follow()
    stopped = processes.worker()
    sync.publish(0, rows=3000)
    stopped.says("has 0 ")
    stopped.send(signal.SIGSTOP)
    base = 0
    for number in range(1, 1301):
        sync.server.publish(sync.version(number, rows=3000))
        if number % 10 == 0:
            await_version(subscriber, number)
        if number == 300:
            base = resident_bytes()
    # 1,000 payloads are 240 MB; what is kept is a handful of them.
    assert resident_bytes() - base < 24 << 20
