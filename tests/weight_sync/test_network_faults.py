"""Frames lost, repeated, reordered, cut and altered between real sockets; foreign and malformed input."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
import zmq
from helpers.weight_sync import await_true, collect_until, follow, raw_socket

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import Announce, FetchChunk, FetchManifest, Manifest, ManifestReply
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer, WeightSubscriber

Frames = list[bytes]
Tamper = Callable[[Frames], list[Frames]]
Make = Callable[..., WeightVersion]


QUICK = BroadcastConfig(chunk_bytes=3000, timeout_s=0.1, heartbeat_s=0.05)


class Proxy:
    """Stands between one subscriber and the learner; `tamper` makes 0 … n messages of each it carries down."""

    def __init__(self, directory: Path, weight_server: WeightServer) -> None:
        self.announce, self.fetch = f"ipc://{directory}/pa", f"ipc://{directory}/pf"
        self.tamper_announce: Tamper = lambda frames: [frames]
        self.tamper_fetch: Tamper = lambda frames: [frames]
        self._context = zmq.Context()
        self._closing = False
        self._up = self._context.socket(zmq.XSUB)
        self._up.connect(weight_server.endpoints.announce)
        self._down = self._context.socket(zmq.XPUB)
        self._down.bind(self.announce)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(weight_server.endpoints.fetch)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.fetch)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller, peer = zmq.Poller(), b""
        for sock in (self._up, self._down, self._dealer, self._router):
            poller.register(sock, zmq.POLLIN)
        while not self._closing:
            for sock, _ in poller.poll(20):
                frames = sock.recv_multipart()
                if sock is self._up:
                    for changed in self.tamper_announce(frames):
                        self._down.send_multipart(changed)
                elif sock is self._down:
                    self._up.send_multipart(frames)
                elif sock is self._router:
                    peer = frames[0]
                    self._dealer.send_multipart(frames[1:])
                else:
                    for changed in self.tamper_fetch(frames):
                        self._router.send_multipart([peer, *changed])
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._closing = True
        self._thread.join()


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
def weight_server(short_dir: Path, stack: ExitStack) -> WeightServer:
    made = WeightServer(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f", QUICK)
    stack.callback(made.close)
    return made


@pytest.fixture
def proxy(short_dir: Path, weight_server: WeightServer, stack: ExitStack) -> Proxy:
    made = Proxy(short_dir, weight_server)
    stack.callback(made.close)
    return made


def assert_honest(seen: list[WeightVersion], make_version: Make) -> None:
    numbers = [version.manifest.version for version in seen]
    assert numbers == sorted(set(numbers))
    for version in seen:
        published = make_version(version.manifest.version)
        assert version.manifest == published.manifest
        for name, tensor in published.tensors.items():
            assert torch.equal(version.tensors[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_faulty_broadcasts_never_give_other_weights(
    kind: str, weight_server: WeightServer, proxy: Proxy, stack: ExitStack, make_version: Make
) -> None:
    faults = proxy.tamper_announce = Faults(kind, seed=1)
    subscriber = follow((proxy.announce, proxy.fetch), stack, QUICK, silence_s=0.5)
    seen: list[WeightVersion] = []
    for number in range(40):
        weight_server.publish(make_version(number))
        time.sleep(0.005)
        if (version := subscriber.latest()) is not None:
            seen.append(version)
    if not seen or seen[-1].manifest.version != 39:
        seen += collect_until(subscriber, 39)
    assert_honest(seen, make_version)
    assert faults.injected > 5


@pytest.mark.parametrize("hold_deltas", [0, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_faulty_answers_never_give_other_weights(
    kind: str, hold_deltas: int, short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    config = msgspec.structs.replace(QUICK, hold_deltas=hold_deltas, chunk_bytes=8000)
    weight_server = WeightServer(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f", config)
    stack.callback(weight_server.close)
    proxy = Proxy(short_dir, weight_server)
    stack.callback(proxy.close)
    faults = proxy.tamper_fetch = Faults(kind, seed=2)
    proxy.tamper_announce = lambda frames: [frames] if len(frames) == 1 else []
    subscriber = follow((proxy.announce, proxy.fetch), stack, config, silence_s=0.5)
    seen = []
    for number in range(20 if hold_deltas else 5):
        weight_server.publish(make_version(number))
        seen += collect_until(subscriber, number)
    assert_honest(seen, make_version)
    assert faults.injected > 3


def test_a_lost_delta_is_replaced_by_a_fetched_one(
    weight_server: WeightServer, proxy: Proxy, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow((proxy.announce, proxy.fetch), stack, QUICK, silence_s=0.5)
    weight_server.publish(make_version(1))
    collect_until(subscriber, 1)
    proxy.tamper_announce = lambda frames: [frames] if len(frames) == 1 else []
    weight_server.publish(make_version(2))
    collect_until(subscriber, 2)
    assert (subscriber.stats.fetch.fetches, subscriber.stats.fetch.catch_ups) == (1, 1)
    proxy.tamper_announce = lambda frames: [frames]
    weight_server.publish(make_version(3))
    collect_until(subscriber, 3)
    assert (subscriber.stats.fetch.catch_ups, subscriber.stats.deltas) == (1, 2)


def test_an_altered_delta_is_refused_counted_and_healed(
    weight_server: WeightServer, proxy: Proxy, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow((proxy.announce, proxy.fetch), stack, QUICK, silence_s=0.5)
    weight_server.publish(make_version(1))
    collect_until(subscriber, 1)

    def alter(frames: Frames) -> list[Frames]:
        return [[frames[0], frames[1][:-1] + b"?"]] if len(frames) == 2 else [frames]

    proxy.tamper_announce = alter
    weight_server.publish(make_version(2))
    assert_honest(collect_until(subscriber, 2), make_version)
    assert subscriber.stats.mismatches == 1
    assert subscriber.stats.fetch.fetches == 2


def test_an_altered_payload_is_refused_counted_and_healed(
    weight_server: WeightServer, proxy: Proxy, stack: ExitStack, make_version: Make
) -> None:
    altered = 0

    def alter(frames: Frames) -> list[Frames]:
        nonlocal altered
        if len(frames) == 2 and altered < 2:
            altered += 1
            return [[frames[0], bytes(len(frames[1]))]]
        return [frames]

    proxy.tamper_fetch = alter
    subscriber = follow((proxy.announce, proxy.fetch), stack, QUICK, silence_s=0.5)
    weight_server.publish(make_version(1))
    assert_honest(collect_until(subscriber, 1), make_version)
    assert subscriber.stats.fetch.mismatches == 1


def test_chunks_that_arrived_are_not_asked_for_again(
    weight_server: WeightServer, proxy: Proxy, stack: ExitStack, make_version: Make
) -> None:
    count = 0

    def lose_the_fifth(frames: Frames) -> list[Frames]:
        nonlocal count
        count += len(frames) == 2
        return [] if count == 5 and len(frames) == 2 else [frames]

    proxy.tamper_fetch = lose_the_fifth
    subscriber = follow((proxy.announce, proxy.fetch), stack, QUICK, silence_s=0.5)
    weight_server.publish(make_version(1))
    collect_until(subscriber, 1)
    chunks = -(-make_version(1).manifest.nbytes // 3000)
    assert subscriber.stats.fetch.retries == 1
    # At most the credit's four chunks were open when the connection was given up.
    assert chunks < weight_server.stats.chunks <= chunks + 4


def reply_with(manifest: Manifest) -> ManifestReply:
    encoded = messages.encode(manifest)
    return ManifestReply(manifest=encoded, checksum=xxhash.xxh3_128_hexdigest(encoded))


def test_the_highest_credit_loses_no_answer(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = WeightSubscriber(
        *weight_server.endpoints, run="run", config=BroadcastConfig(chunk_bytes=500, credit=10_000)
    )
    stack.callback(subscriber.close)
    weight_server.publish(make_version(1, rows=10_000))
    collect_until(subscriber, 1)
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


def test_malformed_requests_change_nothing(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    version = make_version(1)
    weight_server.publish(version)
    attacker = raw_socket(zmq.DEALER, weight_server.endpoints.fetch, stack)
    rubbish = junk(version.manifest.digest)
    for frames in rubbish:
        attacker.send_multipart(frames)
    await_true(lambda: weight_server.stats.refused == len(rubbish), weight_server.stats)
    attacker.send(messages.encode(FetchManifest()))
    reply = messages.decode_reply(attacker.recv())
    assert isinstance(reply, ManifestReply) and reply.manifest is not None
    assert messages.decode_manifest(reply.manifest) == version.manifest
    shouter = raw_socket(zmq.XSUB, weight_server.endpoints.announce, stack)
    for frames in rubbish[5:]:
        if frames[0][:1] not in (b"", b"\0"):
            shouter.send_multipart(frames)
    await_true(lambda: weight_server.stats.refused > len(rubbish), weight_server.stats)
    attacker.send(bytes(1 << 20))  # ZeroMQ hangs up on this peer
    collect_until(follow(weight_server.endpoints, stack, QUICK, silence_s=0.5), 1)


def test_a_request_for_a_version_that_went_is_answered_with_gone(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    weight_server.publish(make_version(1))
    worker = raw_socket(zmq.DEALER, weight_server.endpoints.fetch, stack)
    worker.send(messages.encode(FetchChunk(digest="0" * 32, offset=0, nbytes=10)))
    assert isinstance(messages.decode_reply(worker.recv()), messages.Gone)
    assert weight_server.stats.gone == 1


def test_malformed_broadcasts_and_answers_change_nothing(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    announce, fetch = f"ipc://{short_dir}/a", f"ipc://{short_dir}/f"
    pub = raw_socket(zmq.XPUB, announce, stack, bind=True)
    router = raw_socket(zmq.ROUTER, fetch, stack, bind=True)
    subscriber = follow((announce, fetch), stack, QUICK, silence_s=0.5)
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
    good = make_version(1).manifest
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


def test_a_silent_learner_is_noticed_once_and_followed_again(
    short_dir: Path, stack: ExitStack, make_version: Make, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = f"ipc://{short_dir}/a", f"ipc://{short_dir}/f"
    first = WeightServer(*endpoints, QUICK)
    subscriber = WeightSubscriber(*endpoints, run="run", silence_s=0.15)
    stack.callback(subscriber.close)
    first.publish(make_version(1))
    collect_until(subscriber, 1)
    first.close()
    await_true(lambda: "no announcement" in caplog.text, subscriber.stats)
    time.sleep(0.5)
    second = WeightServer(*endpoints, QUICK)
    stack.callback(second.close)
    second.publish(make_version(2))
    collect_until(subscriber, 2)
    assert subscriber.stats.silences == 1
    assert caplog.text.count("no announcement") == 1


def test_a_peer_that_never_reads_holds_up_nobody(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    version = make_version(1, rows=30_000)
    weight_server.publish(version)
    idler = raw_socket(zmq.DEALER, weight_server.endpoints.fetch, stack)
    ask = FetchChunk(digest=version.manifest.digest, offset=0, nbytes=version.manifest.nbytes)
    for _ in range(200):
        with suppress(zmq.Again):
            idler.send(messages.encode(ask), zmq.NOBLOCK)
    subscriber = WeightSubscriber(*weight_server.endpoints, run="run")
    stack.callback(subscriber.close)
    collect_until(subscriber, 1)
    weight_server.publish(make_version(2, rows=30_000))
    collect_until(subscriber, 2)
