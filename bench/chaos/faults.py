"""What bench/chaos/storm.py does to a cluster. A fault begins, and what it returns ends it some seconds
later."""

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
import redis
import zmq

from areal_q.errors import RecordError
from areal_q.messages import FetchChunk, decode_group, encode
from bench.chaos.cluster import RUN, Cluster
from bench.chaos.promises import FORGED
from buffer.redis_store.keys import Keys

Undo = Callable[[], None]
KEYS = Keys(RUN)
KILLED = ("learner", "redis", "relay", "rollout-1", "rollout-2")
STREAMS = (KEYS.tickets, KEYS.groups, KEYS.eval_tickets, KEYS.eval_groups)


class Fault(NamedTuple):
    name: str
    weight: float
    seconds: tuple[float, float]
    """How long it may last"""
    begin: Callable[[Cluster, random.Random], Undo | None]


def faults(cluster: Cluster) -> list[Fault]:
    """Those that this machine allows."""
    return [*deadly(cluster), *mild(cluster)]


def deadly(cluster: Cluster) -> list[Fault]:
    """By which processes end, or may."""
    hit = [
        Fault(f"kill -9 {name}", 1.0, (0, 0), partial(_signal, name, signal.SIGKILL))
        for name in KILLED
    ]
    hit += [
        Fault(f"restart {name}", 0.7, (0, 0), partial(_signal, name, signal.SIGTERM))
        for name in KILLED
    ]
    hit += [
        Fault(f"full disk: {name}", 0.8, (2, 6), partial(_fill, name)) for name in cluster.disks
    ]
    hit += [Fault(f"clock of {name}", 1.0, (0, 0), partial(_jump, name)) for name in cluster.clocks]
    return hit


def mild(cluster: Cluster) -> list[Fault]:
    """Which every process must outlive."""
    hit = [
        Fault(f"stop {name}", 0.7, (1, 8), partial(_freeze, name))
        for name in (*KILLED, "rollout-0")
    ]
    if cluster.network:
        hit.append(Fault("cut network", 2.0, (1, 12), _cut))
    return [
        *hit,
        Fault("slow consumer", 1.5, (3, 10), _slow_consumer),
        Fault("poison streams", 1.5, (0, 0), _poison_streams),
        Fault("poison sockets", 1.5, (0, 0), _poison_sockets),
        Fault("groups again", 1.0, (0, 0), _again),
    ]


def schedule(found: list[Fault], rng: random.Random) -> Iterator[Fault]:
    """Every fault once, in random order, then by weight."""
    first = found.copy()
    rng.shuffle(first)
    yield from first
    while True:
        yield rng.choices(found, [fault.weight for fault in found])[0]


def _signal(name: str, number: signal.Signals, cluster: Cluster, rng: random.Random) -> None:
    cluster.services[name].send(signal.SIGCONT)
    cluster.services[name].send(number)


def _freeze(name: str, cluster: Cluster, rng: random.Random) -> Undo:
    service = cluster.services[name]
    service.send(signal.SIGSTOP)
    return lambda: service.send(signal.SIGCONT)


def _fill(name: str, cluster: Cluster, rng: random.Random) -> Undo:
    path = cluster.disks[name] / "fill"
    with suppress(OSError), path.open("wb") as file:  # a disk that is full already takes no file
        while True:
            file.write(bytes(1 << 20))
    return lambda: path.unlink(missing_ok=True)


def _jump(name: str, cluster: Cluster, rng: random.Random) -> None:
    """Forward or back, by seconds or an hour; it stays so until the next jump."""
    cluster.clocks[name].write_text(f"{rng.choice((-3600, -30, -5, 0, 5, 30, 3600)):+d}")


def _cut(cluster: Cluster, rng: random.Random) -> Undo:
    assert cluster.network
    cluster.network.cut(True)
    return lambda: cluster.network.cut(False) if cluster.network else None


def _slow_consumer(cluster: Cluster, rng: random.Random) -> Undo:
    """Subscribes, and asks for chunks by the hundred, and reads nothing."""
    context = zmq.Context()
    sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    sub.setsockopt(zmq.RCVHWM, 1)
    sub.subscribe(b"")
    dealer.setsockopt(zmq.RCVHWM, 1)
    sub.connect(cluster.endpoint("announce"))
    dealer.connect(cluster.endpoint("fetch"))
    for offset in range(500):
        request = FetchChunk(digest="0" * 32, offset=offset, nbytes=1 << 20)
        with suppress(zmq.Again):
            dealer.send(encode(request), zmq.NOBLOCK)
    return lambda: context.destroy(linger=0)


def garbage(rng: random.Random, good: bytes = b"") -> bytes:
    """Random bytes, or `good` with a few of its bytes changed or its end cut off."""
    if not good or rng.random() < 0.3:
        return rng.randbytes(rng.randrange(200))
    bad = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        bad[rng.randrange(min(len(bad), 64))] = rng.randrange(256)
    return bytes(bad[: rng.randrange(len(bad))] if rng.random() < 0.3 else bad)


def _poison_streams(cluster: Cluster, rng: random.Random) -> None:
    with _quietly(cluster) as client:
        for stream in STREAMS:
            client.xadd(
                stream, {rng.choice(("record", "other")): rng.randbytes(rng.randrange(200))}
            )
            client.xadd(stream, {"record": b"\xc1" + rng.randbytes(20)})


def _again(cluster: Cluster, rng: random.Random) -> None:
    """Committed groups are committed once more, and one of a ticket that nobody admitted."""
    with _quietly(cluster) as client:
        found: Any = client.xrevrange(KEYS.groups, count=3)
        for _, fields in found:
            client.xadd(KEYS.groups, fields)
            with suppress(RecordError):
                group = decode_group(fields.get(b"record", b""))
                ticket = msgspec.structs.replace(group.ticket, number=FORGED + rng.randrange(10**6))
                forged = msgspec.structs.replace(group, ticket=ticket)
                client.xadd(KEYS.groups, {"record": encode(forged)})


def _poison_sockets(cluster: Cluster, rng: random.Random) -> None:
    """Bytes that are no ZeroMQ on every port, then ZeroMQ messages that are none of ours."""
    for port in cluster.ports.values():
        with suppress(OSError), socket.create_connection((cluster.host, port), 1.0) as raw:
            raw.sendall(rng.randbytes(300))
    context = zmq.Context()
    request = encode(FetchChunk(digest="0" * 32, offset=0, nbytes=1))
    for name in ("fetch", "relay_fetch"):
        for kind in (zmq.DEALER, zmq.REQ, zmq.PUB):
            sock = context.socket(kind)
            sock.connect(cluster.endpoint(name))
            sock.setsockopt(zmq.SNDTIMEO, 200)
            with suppress(zmq.ZMQError):
                for _ in range(20 if kind != zmq.REQ else 1):
                    sock.send_multipart([garbage(rng, request)] * rng.randint(1, 3))
            sock.close(linger=200)
    for name in ("announce", "relay_announce"):
        for kind in (zmq.PUB, zmq.XSUB, zmq.PUSH):
            sock = context.socket(kind)
            sock.connect(cluster.endpoint(name))
            sock.setsockopt(zmq.SNDTIMEO, 200)
            with suppress(zmq.ZMQError):
                for _ in range(20):
                    sock.send(garbage(rng))
            sock.close(linger=200)
    context.term()


@contextmanager
def _quietly(cluster: Cluster) -> Iterator[redis.Redis]:
    """A client whose errors are nobody's: Redis itself may be the one that is being hit."""
    with suppress(redis.RedisError), cluster.client() as client:
        yield client


def usage(pid: int) -> tuple[int, int] | None:
    """(bytes of resident memory, open files) of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
