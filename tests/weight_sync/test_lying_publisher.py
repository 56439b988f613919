"""A publisher that lies: what it says is refused and counted, and the next honest version is followed."""

import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import pytest
import xxhash
import zmq
from helpers.weight_sync import (
    Frames,
    Proxy,
    WeightSync,
    arrive,
    assert_same,
    await_true,
    collect_until,
    free_endpoints,
    reply_with,
)

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import WeightVersionError
from areal_q.messages import (
    Announce,
    ChunkReply,
    Delta,
    DeltasReply,
    FetchManifest,
    Gone,
    Manifest,
    ManifestReply,
)
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion, digest_of
from bench.chaos.faults import usage
from buffer.weight_sync.version_store import delta_header

CONFIG = BroadcastConfig(chunk_bytes=3000, timeout_s=0.2, heartbeat_s=0.02)
Answer = Callable[[Manifest], list[Frames]]
"""What is answered in place of the newest version's manifest"""


def as_honest(manifest: Manifest) -> Manifest:
    """Returns the lie under a digest that fits, as only its author can make it."""
    return msgspec.structs.replace(manifest, digest=digest_of(manifest))


def altered(change: Callable[[Manifest], dict[str, Any]]) -> Answer:
    def answer(told: Manifest) -> list[Frames]:
        lie = as_honest(msgspec.structs.replace(told, **change(told)))
        return [[messages.encode(reply_with(lie))]]

    return answer


def one_tensor(**changes: Any) -> Answer:
    """The first tensor alone, altered, in a manifest that says nothing else."""

    def change(told: Manifest) -> dict[str, Any]:
        spec = msgspec.structs.replace(told.tensors[0], **changes)
        return {"tensors": [spec], "nbytes": spec.nbytes}

    return altered(change)


def moved(index: int, by: int) -> Answer:
    def change(told: Manifest) -> dict[str, Any]:
        specs = [
            msgspec.structs.replace(s, offset=s.offset + by * (i >= index))
            for i, s in enumerate(told.tensors)
        ]
        return {"tensors": specs, "nbytes": told.nbytes + by}

    return altered(change)


def encoded(change: Callable[[bytes], bytes]) -> Answer:
    """The manifest's bytes changed, under a checksum that fits."""

    def answer(told: Manifest) -> list[Frames]:
        lie = change(messages.encode(told))
        checksum = xxhash.xxh3_128_hexdigest(lie)
        return [[messages.encode(ManifestReply(manifest=lie, checksum=checksum))]]

    return answer


def with_a_shape_of(size: object) -> Answer:
    def change(manifest: bytes) -> bytes:
        found = msgspec.msgpack.decode(manifest)
        found["tensors"][0]["shape"] = [size]
        return msgspec.msgpack.encode(found)

    return encoded(change)


LIES: dict[str, Answer] = {
    "60 GiB of no tensor": altered(lambda told: {"tensors": [], "nbytes": 60 << 30}),
    "a tensor of 60 GiB": one_tensor(shape=(60 << 30,), nbytes=60 << 30),
    "a tensor of 2**62 bytes": one_tensor(shape=(1 << 62,), nbytes=1 << 62),
    "a shape that overflows": one_tensor(
        shape=(1 << 40, 1 << 40, 0), nbytes=0, digest=xxhash.xxh3_128_hexdigest(b"")
    ),
    "a shape of 100,000 sizes": one_tensor(shape=(1 << 62,) * 100_000, nbytes=0),
    "a shape of NaN": with_a_shape_of(float("nan")),
    "a shape of -1": with_a_shape_of(-1),
    "more bytes than tensors": altered(lambda told: {"nbytes": told.nbytes + 4096}),
    "fewer bytes than tensors": altered(lambda told: {"nbytes": told.nbytes - 1}),
    "a gap between tensors": moved(1, 1 << 20),
    "tensors that overlap": moved(1, -64),
    "tensors in another order": altered(lambda told: {"tensors": told.tensors[::-1]}),
    "bytes that it has not": altered(lambda told: {"uaq_scale": 7.0}),
    "a digest of other bytes": one_tensor(digest="0" * 32),
    "another name for a digest": altered(lambda told: {"format": "f" * 300}),
    "a table of tables": altered(lambda told: {"model": {"a": [[[{}]]] * 9, "b": b"\xff"}}),
    "a truncated manifest": encoded(lambda m: m[:-5]),
    "a manifest that is too long": encoded(lambda m: m + b"\0"),
    "a manifest of nothing": encoded(lambda m: b""),
    "an array for a manifest": encoded(lambda m: b"\x91" * 500),
    "junk frames": lambda told: [[b"\xff" * 50], [b""], [b"\x80", b"", b"more"], [b"\xc1"]],
}
HARMLESS: dict[str, Answer] = {
    "a version that is held": lambda told: [
        [messages.encode(reply_with(msgspec.structs.replace(told, version=told.version - 1)))]
    ],
    "no version": lambda told: [[messages.encode(ManifestReply(manifest=None))]],
    "no answer": lambda told: [],
}


def honest(frames: Frames) -> list[Frames]:
    return [frames]


def snapshots_only(frames: Frames) -> list[Frames]:
    return [frames] if len(frames) == 1 else []


class Told:
    """Answers with a lie whoever asks for a manifest, and has no deltas."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.count = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        match messages.decode_reply(frames[0]):
            case DeltasReply():
                return [[messages.encode(DeltasReply())]]
            case ManifestReply(manifest=bytes(manifest)):
                self.count += 1
                return self._answer(messages.decode_manifest(manifest))
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
    assert (stats.all_refused + stats.fetch.gone > 0) == (lie in LIES)
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
    header = msgspec.structs.replace(delta_header(base, new.manifest), run="run")

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


def broadcasts(held: WeightVersion) -> list[Frames]:
    """Lies about what comes after the version held."""
    m = held.manifest
    hello = Announce(run="run", epoch=m.epoch, version=m.version + 1, digest=m.digest)
    told = Delta(
        run="run",
        epoch=m.epoch,
        version=m.version + 1,
        digest="0" * 32,
        base=m.version,
        base_digest=m.digest,
    )
    change = msgspec.structs.replace
    body = delta.diff(held, held) or b""
    heads = [
        *(change(told, base_digest="1" * 32, base=base) for base in (m.version, 0, 2**63 - 1)),
        *(change(told, version=version) for version in (0, m.version, 2**63 - 1)),
        change(told, epoch="never"),
    ]
    return [
        *([messages.encode(head), junk] for head in heads for junk in (b"", b"\xff" * 99, body)),
        [messages.encode(change(hello, version=2**63 - 1))],
        [messages.encode(change(hello, epoch="e" * 256))],
        [messages.encode(change(hello, epoch="e" * 300))],
        [messages.encode(change(hello, version=0))],
        [messages.encode(hello), *[b"x"] * 1000],
        [b"\xdf\xff\xff\xff\xff"],
        [b"\x91" * 4000],
        [b""],
    ]


def test_false_announcements_and_deltas_are_refused(sync: WeightSync) -> None:
    proxy = Proxy(sync)
    relay = sync.relay(proxy.endpoints, sync.at("r"))
    worker = sync.follow(relay.endpoints)
    sync.bring(1, worker)
    for number, lie in enumerate(broadcasts(sync.version(1)), 2):
        proxy.tamper_announce = lambda frames, lie=lie: [lie, frames]
        seen = sync.publish(number)
        proxy.tamper_announce = honest
        assert_same(collect_until(worker, number)[-1], seen)
    # What is no message; other lies count as gaps, or are behind the version that came meanwhile.
    assert relay._subscriber.stats.all_refused >= 5


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
    return stack.enter_context(socket.create_connection((host, int(port)), timeout=5))


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
