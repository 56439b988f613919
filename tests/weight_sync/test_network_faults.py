"""Frames lost, repeated, reordered, cut and altered between real sockets; foreign and malformed input."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import zmq
from helpers.commands import stretched
from helpers.weight_sync import (
    Proxy,
    WeightSync,
    arrive,
    assert_same,
    await_true,
    collect_until,
)

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import WeightVersionError
from areal_q.messages import Announce, FetchChunk, FetchManifest, Gone, Manifest, ManifestReply
from areal_q.weights.version import WeightVersion, digest_of
from bench.chaos.lies import Frames, reply_with, snapshots_only
from buffer.weight_sync import fetcher

CONFIG = BroadcastConfig(chunk_bytes=3000, timeout_s=0.1, heartbeat_s=0.05)


class Faults:
    """One kind of fault, at random, to a third of the messages."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind, self._rng = kind, random.Random(seed)
        self._late: list[Frames] = []
        self.injected = 0

    def __call__(self, frames: Frames) -> list[Frames]:
        late, self._late = self._late, []
        if self._rng.random() > 1 / 3:
            return [frames, *late]
        self.injected += 1
        match self._kind:
            case "drop":
                return late
            case "duplicate":
                return [frames, frames, *late]
            case "reorder":
                self._late = [frames]
                return late
            case "truncate":
                i = self._rng.randrange(len(frames))
                cut = frames[i][: self._rng.randrange(len(frames[i]))]
                return [[*frames[:i], cut, *frames[i + 1 :]], *late]
            case "lose a frame":
                return [frames[:-1] or [b""], *late]
            case _:
                i = self._rng.randrange(len(frames))
                altered = bytearray(frames[i] or b"\0")
                altered[self._rng.randrange(len(altered))] ^= 1 << self._rng.randrange(8)
                return [[*frames[:i], bytes(altered), *frames[i + 1 :]], *late]


KINDS = ["drop", "duplicate", "reorder", "truncate", "lose a frame", "flip a bit"]


@pytest.fixture
def proxy(sync: WeightSync) -> Proxy:
    return Proxy(sync)


def assert_honest(seen: list[WeightVersion], sync: WeightSync) -> None:
    numbers = [version.manifest.version for version in seen]
    assert numbers == sorted(set(numbers))
    for version in seen:
        assert_same(version, sync.version(version.manifest.version))


@pytest.mark.parametrize("kind", KINDS)
def test_faulty_broadcasts_never_give_other_weights(
    sync: WeightSync, proxy: Proxy, kind: str
) -> None:
    faults = proxy.tamper_announce = Faults(kind, seed=1)
    subscriber = sync.follow(proxy.endpoints)
    seen: list[WeightVersion] = []
    for number in range(40):
        sync.server.publish(sync.version(number))
        time.sleep(0.005)
        if (version := subscriber.latest()) is not None:
            seen.append(version)
    if not seen or seen[-1].manifest.version != 39:
        seen += collect_until(subscriber, 39)
    assert_honest(seen, sync)
    assert faults.injected > 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hold_deltas", [0, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_faulty_answers_never_give_other_weights(
    sync: WeightSync, kind: str, hold_deltas: int
) -> None:
    sync.config = msgspec.structs.replace(CONFIG, hold_deltas=hold_deltas, chunk_bytes=8000)
    proxy = Proxy(sync)
    faults = proxy.tamper_fetch = Faults(kind, seed=2)
    proxy.tamper_announce = snapshots_only
    subscriber = sync.follow(proxy.endpoints)
    seen = []
    for number in range(20 if hold_deltas else 5):
        sync.server.publish(sync.version(number))
        seen += collect_until(subscriber, number)
    assert_honest(seen, sync)
    assert faults.injected > 3


@dataclass
class Spoil:
    """Changes the messages with a body, by their number: a delta that is sent, or a chunk of an answer."""

    numbers: tuple[int, ...]
    change: Callable[[bytes], list[bytes]]
    seen: int = -1

    def __call__(self, frames: Frames) -> list[Frames]:
        self.seen += len(frames) == 2
        if len(frames) != 2 or self.seen not in self.numbers:
            return [frames]
        return [[frames[0], body] for body in self.change(frames[1])]


def lose(_: bytes) -> list[bytes]:
    return []


HEALED = {
    "a lost delta": ("tamper_announce", (0,), lose, (1, 1, 2, 0, 0)),
    "an altered delta": ("tamper_announce", (0,), lambda b: [b[:-1] + b"?"], (2, 0, 1, 1, 0)),
    "an altered payload": ("tamper_fetch", (0, 1), lambda b: [bytes(len(b))], (1, 0, 2, 0, 1)),
}
"""What goes wrong on the way of three versions, and the counts of fetches, catch-ups, deltas, refused deltas
and refused payloads"""


@pytest.mark.parametrize("fault", HEALED)
def test_a_lost_or_altered_message_is_counted_and_healed(
    sync: WeightSync, proxy: Proxy, fault: str
) -> None:
    side, numbers, change, counts = HEALED[fault]
    setattr(proxy, side, Spoil(numbers, change))
    subscriber = sync.follow(proxy.endpoints)
    for number in (1, 2, 3):
        sync.bring(number, subscriber)
    stats, fetch = subscriber.stats, subscriber.stats.fetch
    found = fetch.fetches, fetch.catch_ups, stats.deltas, stats.mismatches, fetch.mismatches
    assert found == counts


def test_chunks_that_arrived_are_not_asked_for_again(sync: WeightSync, proxy: Proxy) -> None:
    proxy.tamper_fetch = Spoil((4,), lose)
    subscriber = sync.follow(proxy.endpoints, timeout_s=stretched(1.0))
    sync.bring(1, subscriber)
    chunks = -(-sync.version(1).manifest.nbytes // CONFIG.chunk_bytes)
    assert subscriber.stats.fetch.retries == 1
    # At most the credit's four chunks were open when the connection was given up.
    assert chunks < sync.server.stats.chunks <= chunks + 4


def test_the_highest_credit_loses_no_answer(sync: WeightSync) -> None:
    subscriber = sync.follow(chunk_bytes=500, credit=10_000, timeout_s=5.0, silence_s=10.0)
    arrive(subscriber, sync.publish(1, rows=10_000))
    assert subscriber.stats.fetch.retries == 0


def junk(digest: str) -> list[Frames]:
    chunk = FetchChunk(digest=digest, offset=0, nbytes=10)
    asked = [
        msgspec.structs.replace(chunk, offset=-1),
        msgspec.structs.replace(chunk, nbytes=0),
        msgspec.structs.replace(chunk, nbytes=-5),
        msgspec.structs.replace(chunk, nbytes=1 << 60),
        msgspec.structs.replace(chunk, offset=1 << 62),
    ]
    bodies = [b"", b"\0", b"\xff" * 100, b"\x91" * 4000, b"\xa1\xff", b"\x80", b"{}", b"\x92\x01"]
    return [
        *([messages.encode(a)] for a in asked),
        *([b] for b in bodies),
        [messages.encode(FetchManifest()), b"more"],
        [b"", messages.encode(FetchManifest())],
    ]


def test_malformed_requests_change_nothing(sync: WeightSync) -> None:
    version = sync.publish(1)
    attacker = sync.socket(zmq.DEALER, sync.server.endpoints.fetch)
    rubbish = junk(version.manifest.digest)
    for frames in rubbish:
        attacker.send_multipart(frames)
    await_true(lambda: sync.server.stats.refused == len(rubbish), sync.server.stats)
    attacker.send(messages.encode(FetchManifest()))
    reply = messages.decode_reply(attacker.recv())
    assert isinstance(reply, ManifestReply) and reply.manifest is not None
    assert messages.decode_manifest(reply.manifest) == version.manifest
    shouter = sync.socket(zmq.XSUB, sync.server.endpoints.announce)
    for frames in rubbish[5:]:
        if frames[0][:1] not in (b"", b"\0"):
            shouter.send_multipart(frames)
    await_true(lambda: sync.server.stats.refused > len(rubbish), sync.server.stats)
    attacker.send(bytes(1 << 20))  # ZeroMQ hangs up on this peer
    arrive(sync.follow(), version)


def test_a_request_for_a_version_that_went_is_answered_with_gone(sync: WeightSync) -> None:
    sync.publish(1)
    assert isinstance(sync.ask(FetchChunk(digest="0" * 32, offset=0, nbytes=10)), Gone)
    assert sync.server.stats.gone == 1


def test_malformed_broadcasts_and_answers_change_nothing(sync: WeightSync) -> None:
    pub = sync.socket(zmq.XPUB, sync.at().announce, bind=True)
    router = sync.socket(zmq.ROUTER, sync.at().fetch, bind=True)
    subscriber = sync.follow(sync.at(), timeout_s=60.0)  # another connection has another identity
    assert pub.recv() == b"\1"
    hello = Announce(run="run", epoch="a", version=1, digest="")
    rubbish = [
        *junk(""),
        [messages.encode(hello), b"more"],
        [messages.encode(msgspec.structs.replace(hello, run="another"))],
    ]
    for frames in rubbish:
        pub.send_multipart(frames)
        time.sleep(0.002)  # over the high-water mark they would be dropped, not refused
    await_true(lambda: subscriber.stats.refused == len(rubbish), subscriber.stats)
    pub.send(messages.encode(hello))
    peer, request = router.recv_multipart()
    assert messages.decode_request(request) == FetchManifest()
    good = sync.version(1).manifest
    bad = [
        msgspec.structs.replace(good, digest="0" * 32),
        msgspec.structs.replace(good, nbytes=1 << 50),
        msgspec.structs.replace(good, nbytes=-1),
    ]
    for count, manifest in enumerate(bad, 1):
        router.send_multipart([peer, messages.encode(reply_with(manifest))])
        await_true(lambda n=count: subscriber.stats.fetch.mismatches == n, subscriber.stats)
        peer, request = router.recv_multipart()
        assert messages.decode_request(request) == FetchManifest()
    before = subscriber.stats.fetch.refused
    for frames in junk(""):
        router.send_multipart([peer, *frames])
    await_true(lambda: subscriber.stats.fetch.refused == before + len(junk("")), subscriber.stats)
    assert subscriber.latest() is None


def other_digest(_: Manifest, held: Manifest) -> Manifest:
    return msgspec.structs.replace(held, version=2, digest="0" * 32)


def other_bytes(told: Manifest, _: Manifest) -> Manifest:
    first, *others = told.tensors
    tensors = [msgspec.structs.replace(first, digest="0" * 32), *others]
    lie = msgspec.structs.replace(told, tensors=tensors)
    return msgspec.structs.replace(lie, digest=digest_of(lie))


def other_scale(told: Manifest, _: Manifest) -> Manifest:
    return msgspec.structs.replace(told, uaq_scale=2.0)


@pytest.mark.parametrize(
    ("lie", "seen"),
    [(other_digest, "mismatches"), (other_bytes, "gone"), (other_scale, "mismatches")],
)
def test_a_publisher_that_lies_is_refused_until_it_does_not(
    sync: WeightSync,
    proxy: Proxy,
    lie: Callable[[Manifest, Manifest], Manifest],
    seen: str,
) -> None:
    """It tells of the bytes held under another digest, of bytes that it does not have, or of how to compute
    with them what is not so. It is asked again, after rests."""
    asked: list[float] = []
    subscriber = sync.follow(proxy.endpoints, timeout_s=60.0)
    sync.bring(1, subscriber)
    held, told = (sync.version(number).manifest for number in (1, 2))

    def tamper(frames: Frames) -> list[Frames]:
        match messages.decode_reply(frames[0]):
            case messages.DeltasReply():
                return [[messages.encode(messages.DeltasReply())]]
            case ManifestReply():
                asked.append(time.monotonic())
                return [[messages.encode(reply_with(lie(told, held)))]]
        return [frames]

    proxy.tamper_announce, proxy.tamper_fetch = snapshots_only, tamper
    version = sync.publish(2)
    await_true(lambda: getattr(subscriber.stats.fetch, seen) >= 3, subscriber.stats)
    assert subscriber.latest() is None
    rests = [after - before for before, after in itertools.pairwise(asked)]
    assert min(rests) > 0.9 * fetcher.FIRST_REST_S
    proxy.tamper_fetch = lambda frames: [frames]
    arrive(subscriber, version)


def test_a_silent_learner_is_noticed_once_and_followed_again(
    sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    silence_s = stretched(0.15)
    subscriber = sync.follow(silence_s=silence_s)
    sync.bring(1, subscriber)
    sync.server.close()
    await_true(lambda: "no announcement" in caplog.text, subscriber.stats)
    time.sleep(3 * silence_s)
    assert subscriber.silent
    sync.server = sync.serve()
    sync.bring(2, subscriber)
    assert not subscriber.silent
    assert subscriber.stats.silences == 1
    assert caplog.text.count("no announcement") == 1


@pytest.mark.parametrize("unanswered", [0, 2000])
def test_pauses_double_however_much_of_a_version_was_right(
    monkeypatch: pytest.MonkeyPatch, unanswered: int
) -> None:
    """Each good chunk began them anew: a version that is spoilt at its end was fetched five times a second.
    After an outage of hours the pause overflowed, and the thread ended."""
    with zmq.Context() as context:
        made = fetcher.Fetcher(
            context, zmq.Poller(), "tcp://127.0.0.1:9", lambda _: True, BroadcastConfig(), None
        )
        pauses: list[float] = []
        made._failures = unanswered
        monkeypatch.setattr(made, "_rest", pauses.append)
        for _ in range(4):
            made._refuse(WeightVersionError("it does not hash to its digest"))
            made._failures = min(made._failures, 1)  # as a chunk does
        made.dealer.close(linger=0)
    assert pauses == [0.1, 0.2, 0.4, 0.8]
