"""A publisher that lies: it stands between those who follow and the learner, and changes what it carries."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import xxhash
import zmq

from areal_q import messages
from areal_q.errors import RecordError
from areal_q.messages import Announce, Broadcast, Delta, DeltasReply, Manifest, ManifestReply
from areal_q.weights.version import digest_of
from buffer.weight_sync import Endpoints

Frames = list[bytes]
Tamper = Callable[[Frames], list[Frames]]
Answer = Callable[[Manifest], list[Frames]]
"""What is answered in place of the newest version's manifest"""


class Proxy:
    """Stands between one subscriber and the learner; `tamper` makes 0 … n messages of each it carries down."""

    def __init__(self, upstream: Endpoints, listen: Endpoints) -> None:
        self.endpoints = listen
        self.tamper_announce: Tamper = lambda frames: [frames]
        self.tamper_fetch: Tamper = lambda frames: [frames]
        self._closing = False
        self._context = zmq.Context()
        self._up, self._down, self._dealer, self._router = (
            self._context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB, zmq.DEALER, zmq.ROUTER)
        )
        self._down.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._up.connect(upstream.announce)
        self._dealer.connect(upstream.fetch)
        self._down.bind(listen.announce)
        self._router.bind(listen.fetch)
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
                    with suppress(zmq.Again):  # the learner is gone
                        self._dealer.send_multipart(frames[1:], zmq.NOBLOCK)
                else:
                    for changed in self.tamper_fetch(frames):
                        self._router.send_multipart([peer, *changed])

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


def reply_with(manifest: Manifest) -> ManifestReply:
    encoded = messages.encode(manifest)
    return ManifestReply(manifest=encoded, checksum=xxhash.xxh3_128_hexdigest(encoded))


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


def renumbered(by: int) -> Answer:
    """Published weights, and their digest, under another number."""

    def answer(told: Manifest) -> list[Frames]:
        lie = msgspec.structs.replace(told, version=told.version + by)
        return [[messages.encode(reply_with(lie))]]

    return answer


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
    "a version that is held": renumbered(-1),
    "the number of a later version": renumbered(1000),
    "junk frames": lambda told: [[b"\xff" * 50], [b""], [b"\x80", b"", b"more"], [b"\xc1"]],
}
HARMLESS: dict[str, Answer] = {
    "no version": lambda told: [[messages.encode(ManifestReply(manifest=None))]],
    "no answer": lambda told: [],
}


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


def broadcasts(held: Broadcast, body: bytes = b"") -> list[Frames]:
    """Returns lies about what comes after the version `held`; `body` is a delta that changes nothing."""
    change = msgspec.structs.replace
    hello = Announce(run=held.run, epoch=held.epoch, version=held.version + 1, digest=held.digest)
    told = Delta(
        run=held.run,
        epoch=held.epoch,
        version=held.version + 1,
        digest="0" * 32,
        base=held.version,
        base_digest=held.digest,
    )
    heads = [
        *(change(told, base_digest="1" * 32, base=base) for base in (held.version, 0, 2**63 - 1)),
        *(change(told, version=version) for version in (0, held.version, 2**63 - 1)),
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


class Liar(Proxy):
    """Tells a lie of some kind with every announcement, and in place of most manifests."""

    def __init__(self, upstream: Endpoints, listen: Endpoints, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(upstream, listen)
        self.tamper_announce, self.tamper_fetch = self._announced, self._answered

    def _announced(self, frames: Frames) -> list[Frames]:
        with suppress(RecordError):
            lie = self._rng.choice(broadcasts(messages.decode_broadcast(frames[0])))
            return [lie, *(snapshots_only(frames) if self._rng.random() < 0.7 else [frames])]
        return [frames]

    def _answered(self, frames: Frames) -> list[Frames]:
        with suppress(RecordError):
            if self._rng.random() < 0.7:
                return Told(self._rng.choice([*(LIES | HARMLESS).values()]))(frames)
        return [frames]
