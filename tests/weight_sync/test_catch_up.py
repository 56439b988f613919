"""Workers some versions behind get the deltas they lack; what does not get on is told."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import zmq
from helpers.weight_sync import WeightSync, arrive, await_true, publish

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import Announce, DeltasReply, FetchChunk, FetchDeltas, FetchHeld, HeldReply
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightSubscriber

CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=1.0, chunk_bytes=1000, hold=2, hold_deltas=10)


class Herald:
    """Announces by hand, so that a test decides when a worker learns of a version."""

    def __init__(self, sync: WeightSync) -> None:
        self._sync, self._endpoint = sync, sync.at("herald").announce
        self._pub = sync.socket(zmq.XPUB, self._endpoint, bind=True)

    def follow(self, **settings: Any) -> WeightSubscriber:
        """Starts a subscriber that hears the herald and asks the server."""
        ends = self._endpoint, self._sync.at().fetch
        made = self._sync.follow(ends, silence_s=10.0, **settings)
        assert self._pub.recv() == b"\1"
        return made

    def tell(self, version: WeightVersion, *subscribers: WeightSubscriber) -> None:
        """Announces the version and waits until each of them has it."""
        m = version.manifest
        told = Announce(run=m.run, epoch=m.epoch, version=m.version, digest=m.digest)
        self._pub.send(messages.encode(told))
        for subscriber in subscribers:
            arrive(subscriber, version)


@pytest.fixture
def herald(sync: WeightSync) -> Herald:
    return Herald(sync)


@dataclass
class Case:
    """Versions that are published, those that a worker is told of, and what the others cost it."""

    versions: list[int]
    fetches: int = 1
    catch_ups: int = 1
    told: list[int] = field(default_factory=lambda: [0, -1])
    fields: list[dict[str, int]] = field(default_factory=list)
    most_bytes: float = 0.1
    """The part of a whole version that the deltas have at most."""


BEHIND = {
    "1 version": Case([0, 1]),
    "2 versions": Case([0, 1, 2]),
    "3 versions": Case([0, 1, 2, 3]),
    "as many as are held": Case([*range(11)], most_bytes=0.2),
    "more than are held": Case([*range(12)], fetches=2, catch_ups=0),
    "another layout": Case([0, 1, 2], 2, 0, fields=[{}, {"rows": 400}, {"rows": 400}]),
    "numbers that jump": Case([3, 2**31 + 1, 2**62], catch_ups=2, told=[0, 1, 2]),
    "weights that come back": Case([0, 1, 0, 0], fields=[{"version": n} for n in range(4)]),
    "weights that come back, and move on": Case(
        [0, 1, 0, 1, 1], catch_ups=2, told=[0, 2, -1], fields=[{"version": n} for n in range(5)]
    ),
}


@pytest.mark.parametrize("case", BEHIND)
def test_a_worker_behind_fetches_deltas_or_else_a_snapshot(
    sync: WeightSync, herald: Herald, case: str
) -> None:
    wanted = BEHIND[case]
    subscriber = herald.follow()
    fields = wanted.fields or [{}] * len(wanted.versions)
    versions = [sync.version(n, **f) for n, f in zip(wanted.versions, fields, strict=True)]
    told = [versions[index] for index in wanted.told]
    for version in versions:
        publish(sync.server, version)
        if version in told:
            herald.tell(version, subscriber)
    stats = subscriber.stats
    assert (stats.fetch.fetches, stats.fetch.catch_ups) == (wanted.fetches, wanted.catch_ups)
    assert stats.fetch.catch_up_bytes < wanted.most_bytes * versions[0].manifest.nbytes
    taken = versions if wanted.catch_ups else told
    passed_over = taken[-1].manifest.version - taken[0].manifest.version - len(taken) + 1
    assert stats.skipped == passed_over


@pytest.mark.parametrize(
    ("settings", "stalls"),
    [({"max_delta_bytes": 100}, 0), ({"max_delta_bytes": 0}, 0), ({"stall_s": 0.01}, 1)],
    ids=["too large", "turned off", "too slow"],
)
def test_a_version_without_its_delta_is_announced_and_fetched(
    sync: WeightSync, settings: dict[str, Any], stalls: int
) -> None:
    sync.server = sync.serve(heartbeat_s=30.0, **settings)
    subscriber = sync.follow(silence_s=60.0)
    late = threading.Event()
    sync.stack.callback(late.set)
    if stalls:
        sync.server._differ.submit(late.wait)  # what is in its way before the delta
    for number in (1, 2):
        sync.bring(number, subscriber)
    assert (sync.server.stats.stalls, sync.server.stats.deltas) == (stalls, 0)
    assert subscriber.stats.fetch.fetches == 2


def since(version: WeightVersion) -> FetchDeltas:
    m = version.manifest
    return FetchDeltas(epoch=m.epoch, base=m.version, base_digest=m.digest)


def held_deltas(sync: WeightSync) -> list[int | None]:
    held = sync.ask(FetchHeld())
    assert isinstance(held, HeldReply)
    return [version.delta_bytes for version in held.versions]


def test_the_deltas_that_are_missed_are_those_that_were_sent(sync: WeightSync) -> None:
    sync.publish(*range(5))
    reply = sync.ask(since(sync.version(1)))
    assert isinstance(reply, DeltasReply)
    assert [(d.base, d.version) for d in reply.deltas] == [(1, 2), (2, 3), (3, 4)]
    assert reply.sizes == held_deltas(sync)[-3:]


def test_another_layout_breaks_the_chain(sync: WeightSync) -> None:
    sync.publish(0)
    sync.publish(1, 2, rows=400)
    assert sync.ask(since(sync.version(0))) == DeltasReply()
    assert sync.ask(since(sync.version(1, rows=400))) != DeltasReply()


def test_deltas_held_stay_below_their_limit(sync: WeightSync) -> None:
    one = 200  # bytes of a delta of make_version, roughly
    sync.server = sync.serve(max_delta_bytes=2 * one)
    sync.publish(*range(6))
    sizes = [size for size in held_deltas(sync) if size is not None]
    assert sizes and sum(sizes) <= 2 * one and sync.server.stats.deltas == 5
    assert sync.ask(since(sync.version(0))) == DeltasReply()


def test_many_workers_behind_are_served_by_one_catch_up(sync: WeightSync, herald: Herald) -> None:
    subscribers = [herald.follow() for _ in range(8)]
    herald.tell(sync.publish(0), *subscribers)
    herald.tell(sync.publish(1, 2, 3, 4), *subscribers)
    assert sync.server.stats.catch_ups == 8
    assert len(sync.server._handler._catch_ups) == 1


def test_a_stalled_sync_is_an_event_and_is_told_when_it_ends(
    sync: WeightSync, herald: Herald, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    subscriber = herald.follow(stall_s=0.2, timeout_s=0.1)
    assert subscriber.behind_s == 0.0
    for _ in range(4):
        herald.tell(sync.version(3))
        time.sleep(0.1)
    await_true(lambda: subscriber.stats.stalls == 1, subscriber.stats)
    assert "sync stalled: version 3 is known, -1 is held" in caplog.text
    assert subscriber.behind_s > 0.2
    sync.bring(3, subscriber)
    assert subscriber.behind_s == 0.0 and subscriber.stats.stalls == 1
    assert "weights arrive again" in caplog.text
    herald.tell(sync.version(4))
    await_true(lambda: subscriber.stats.stalls == 2, subscriber.stats)


def test_workers_that_join_between_versions_follow_at_once(sync: WeightSync) -> None:
    subscribers: list[WeightSubscriber] = []
    for number in range(40):
        sync.server.publish(sync.version(number))
        if number % 4 == 0:
            subscribers.append(sync.follow())
        time.sleep(0.01)
    for subscriber in subscribers:
        arrive(subscriber, sync.version(39))
    assert all(r.stats.mismatches == r.stats.fetch.mismatches == 0 for r in subscribers)


@pytest.mark.parametrize(
    ("idle", "workers", "rows", "chunk", "requests", "queued"),
    [(1, 1, 30_000, 2_500_000, 200, 1000), (4, 12, 2000, 1000, 150, 1)],
    ids=["one that asks for all 200 times", "four with the smallest queues"],
)
def test_peers_that_never_read_hold_up_nobody(
    sync: WeightSync, idle: int, workers: int, rows: int, chunk: int, requests: int, queued: int
) -> None:
    version = sync.publish(0, rows=rows)
    announce, fetch = sync.server.endpoints
    nbytes = version.manifest.nbytes
    size = min(chunk, nbytes)
    for _ in range(idle):
        sync.socket(zmq.SUB, announce, queued=queued)
        dealer = sync.socket(zmq.DEALER, fetch, queued=queued)
        for start in range(requests):
            offset = start * size % (nbytes - size + 1)
            request = FetchChunk(digest=version.manifest.digest, offset=offset, nbytes=size)
            dealer.send(messages.encode(request))
    subscribers = [sync.follow() for _ in range(workers)]
    for subscriber in subscribers:
        arrive(subscriber, version)
    await_true(lambda: sync.server.stats.subscribers == idle + workers, sync.server.stats)
    for number in range(1, 31 if rows < 10_000 else 3):
        version = sync.publish(number, rows=rows)
        for subscriber in subscribers:
            arrive(subscriber, version)
    assert all(r.stats.fetch.fetches == 1 for r in subscribers)
