"""A publisher that lies: what it says is refused and counted, and the next honest version is followed."""

import signal
import socket
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import msgspec
import pytest
import xxhash
import zmq
from helpers.commands import stretched
from helpers.weight_sync import (
    Proxy,
    WeightSync,
    arrive,
    assert_same,
    await_true,
    collect_until,
    free_endpoints,
)

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import WeightVersionError
from areal_q.messages import (
    Announce,
    ChunkReply,
    DeltasReply,
    FetchManifest,
    Gone,
    Manifest,
    ManifestReply,
)
from areal_q.weights import delta
from areal_q.weights.version import PayloadPool, WeightVersion
from bench.chaos.faults import usage
from bench.chaos.lies import HARMLESS, LIES, Frames, Liar, Told, broadcasts, snapshots_only
from buffer.weight_sync.chunks import ChunkBuffer
from buffer.weight_sync.version_store import DeltaLink

CONFIG = BroadcastConfig(chunk_bytes=3000, timeout_s=0.2, heartbeat_s=0.02)


def honest(frames: Frames) -> list[Frames]:
    return [frames]


@pytest.mark.parametrize("lie", [*LIES, *HARMLESS])
def test_a_lie_is_refused_and_the_next_version_followed(sync: WeightSync, lie: str) -> None:
    proxy = Proxy(sync)
    relay = sync.relay(proxy.endpoints, sync.at("r"))
    worker = sync.follow(relay.endpoints)
    sync.bring(1, worker)
    told = Told((LIES | HARMLESS)[lie])
    proxy.tamper_announce, proxy.tamper_fetch = snapshots_only, told
    sync.publish(2)
    await_true(lambda: told.count >= 3, relay.status)
    stats = relay._subscriber.stats
    assert stats.received == 1 and worker.latest() is None
    if lie in LIES:
        assert stats.all_refused + stats.fetch.gone > 0
    else:  # a late answer may be refused, as one that was not asked for
        assert stats.mismatches == stats.fetch.mismatches == stats.fetch.gone == 0
    proxy.tamper_announce = proxy.tamper_fetch = honest
    sync.bring(3, worker)
    assert relay.status()["version"] == 3


def test_a_learner_without_a_version_is_asked_at_rests(sync: WeightSync) -> None:
    """It may have restarted since it told of one, and then has none for as long as its warm start takes."""
    pub = sync.socket(zmq.XPUB, sync.at().announce, bind=True)
    router = sync.socket(zmq.ROUTER, sync.at().fetch, bind=True)
    sync.follow(sync.at(), timeout_s=60.0)
    assert pub.recv() == b"\1"
    pub.send(messages.encode(Announce(run="run", epoch="a", version=1, digest="")))
    began = time.monotonic()
    for _ in range(5):
        peer, request = router.recv_multipart()
        assert messages.decode_request(request) == FetchManifest()
        router.send_multipart([peer, messages.encode(ManifestReply(manifest=None))])
    assert time.monotonic() - began > 0.35, "it rests for 100 ms after each"


def catch_up(base: Manifest, old: WeightVersion, new: WeightVersion) -> Callable[[Frames], Any]:
    """Answers whoever asks for deltas with one from `old` to `new`, which it says begins at `base`."""
    body = delta.diff(old, new) or b""
    digest = xxhash.xxh3_128_hexdigest(body)
    header = msgspec.structs.replace(DeltaLink(base, new.manifest, b"").header, run="run")

    def tamper(frames: Frames) -> list[Frames]:
        match messages.decode_reply(frames[0]):
            case DeltasReply():
                reply = DeltasReply(deltas=[header], sizes=[len(body)], digest=digest)
                return [[messages.encode(reply)]]
            case Gone():
                chunk = ChunkReply(digest=digest, offset=0, nbytes=len(body))
                return [[messages.encode(chunk), body]]
        return [frames]

    return tamper


@pytest.mark.parametrize("lie", [{"version": 3}, {"version": 5}, {"version": 9, "run": "other"}])
def test_deltas_back_or_to_another_run_are_refused(sync: WeightSync, lie: dict[str, Any]) -> None:
    proxy = Proxy(sync)
    worker = sync.follow(proxy.endpoints, chunk_bytes=1 << 20)
    sync.bring(5, worker)
    held = sync.version(5)
    proxy.tamper_announce = snapshots_only
    proxy.tamper_fetch = catch_up(held.manifest, held, sync.version(6, **lie))
    arrive(worker, sync.publish(6))  # in full, since the publisher's deltas are not trusted
    assert worker.stats.mismatches == 1 and worker.stats.deltas == 0


def test_false_announcements_and_deltas_are_refused(sync: WeightSync) -> None:
    proxy = Proxy(sync)
    relay = sync.relay(proxy.endpoints, sync.at("r"))
    worker = sync.follow(relay.endpoints)
    sync.bring(1, worker)
    held = sync.version(1)
    manifest = held.manifest
    told = Announce(
        run="run", epoch=manifest.epoch, version=manifest.version, digest=manifest.digest
    )
    for number, lie in enumerate(broadcasts(told, delta.diff(held, held) or b""), 2):
        proxy.tamper_announce = lambda frames, lie=lie: [lie, frames]
        seen = sync.publish(number)
        # Nothing comes but through the proxy, which a busy machine lets look at a version late.
        assert_same(collect_until(worker, number)[-1], seen)
    # What is no message; other lies count as gaps, or are behind the version that came meanwhile.
    assert relay._subscriber.stats.all_refused >= 5


def test_a_size_that_is_only_claimed_takes_no_memory() -> None:
    """A list of 21 million chunks took 700 MB and two seconds, at every such lie."""
    payload = PayloadPool().lend(1 << 30)
    tracemalloc.start()
    try:
        chunks = ChunkBuffer("d" * 32, payload.numpy().data, 64)
        asked = chunks.next_requests(4)
        chunks.ask_again()
        assert chunks.next_requests(4) == asked and chunks.front == 0 and not chunks.complete
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_liar_gives_nobody_other_weights(sync: WeightSync) -> None:
    """It tells lies at random, through a relay and at its place; honest versions come through, too."""
    liars = [Liar(sync.server.endpoints, sync.at(name), Random(name)) for name in ("a", "b")]
    for liar in liars:
        sync.stack.callback(liar.close)
    relay = sync.relay(liars[0].endpoints, sync.at("r"))
    followers = [sync.follow(relay.endpoints), sync.follow(liars[1].endpoints)]
    for number in range(1, 9):  # each comes after rests of 0.8 s together
        version = sync.publish(number)
        for follower in followers:
            arrive(follower, version)


@pytest.mark.parametrize("end", ["_subscriber", "_server"])
def test_a_relay_that_is_dead_inside_says_so(sync: WeightSync, end: str) -> None:
    """Its process lived on, serving what it had, or nothing."""
    relay = sync.relay(sync.server.endpoints, sync.at("r"))
    part = getattr(relay, end)
    part.close()
    with pytest.raises(WeightVersionError, match=r"thread that \w+ has ended"):
        relay.status()


def connected(endpoint: str, stack: ExitStack) -> socket.socket:
    host, port = endpoint.removeprefix("tcp://").split(":")
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=stretched(5)))


def press(sync: WeightSync, endpoints: tuple[str, str], stack: ExitStack) -> None:
    """Thousands of connections that say nothing, and peers that ask without reading."""
    for number in range(3000):
        with suppress(OSError):  # hung up on
            connected(endpoints[number % 2], stack)
    for _ in range(20):
        sync.socket(zmq.SUB, endpoints[0], queued=1)
        asker = sync.socket(zmq.DEALER, endpoints[1], queued=1)
        for _ in range(2000):
            with suppress(zmq.Again):
                asker.send(messages.encode(FetchManifest()), zmq.NOBLOCK)


@pytest.mark.slow
def test_a_relay_s_process_outlives_lies_and_floods(sync: WeightSync, stack: ExitStack) -> None:
    """Afterwards it follows an honest version, and holds no more memory and files than before, or little."""
    proxy = Proxy(sync)
    listen = free_endpoints()
    process = sync.relay_process(listen, proxy.endpoints)
    assert process.stderr
    stack.enter_context(ThreadPoolExecutor(1)).submit(process.stderr.read)  # what it says
    worker = sync.follow(listen)
    sync.bring(1, worker)
    before = usage(process.pid)
    number = 2
    for answer in LIES.values():
        told = proxy.tamper_fetch = Told(answer)
        proxy.tamper_announce = snapshots_only
        sync.publish(number)
        await_true(lambda told=told: told.count >= 2, process.poll)
        proxy.tamper_announce = proxy.tamper_fetch = honest
        sync.bring(number + 1, worker)
        number += 2
    flood = [[b"\xff" * 200]] * 200_000
    for pressed in (False, True):
        if pressed:
            press(sync, listen, stack)
        proxy.tamper_announce = lambda frames: [*flood, frames]
        sync.publish(number)
        proxy.tamper_announce = honest
        sync.bring(number + 1, worker)
        number += 2
    assert process.poll() is None
    after = usage(process.pid)
    assert before and after
    assert after[0] - before[0] < 500 << 20
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
