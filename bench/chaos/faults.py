"""What bench/chaos/storm.py does to a cluster. A fault begins, and what it returns ends it some seconds
later."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import redis
import zmq

from areal_q.config import load
from areal_q.errors import RecordError
from areal_q.messages import FetchChunk, decode_group, encode
from areal_q.system.ports import free_ports
from bench.chaos.cluster import RUN, Cluster
from bench.chaos.foreign_hand import ForeignHand
from bench.chaos.lies import Liar
from bench.chaos.promises import FORGED
from bench.chaos.redis_faults import flush, quietly, replica, take_over
from buffer.redis_store.keys import Keys
from buffer.redis_store.lease import LEASE_S
from buffer.weight_sync import Endpoints

Undo = Callable[[], None]
KEYS = Keys(RUN)
KILLED = ("learner", "redis", "relay", "rollout-1", "rollout-2")
STREAMS = (KEYS.tickets, KEYS.groups, KEYS.eval_tickets, KEYS.eval_groups)
REFUSED_S = 120.0
"""The longest that a learner which is to be refused may take, most of it to import torch"""


class Fault(NamedTuple):
    name: str
    weight: float
    seconds: tuple[float, float]
    """How long it may last"""
    begin: Callable[[Cluster, random.Random], Undo | None]
    alone: bool = False
    """Whether the run must be at work, under no other fault, before it begins and before it ends"""


def faults(cluster: Cluster) -> list[Fault]:
    """Those that this machine allows."""
    return [*deadly(cluster), *mild(cluster)]


def deadly(cluster: Cluster) -> list[Fault]:
    """Returns the faults by which processes end, or may."""
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
    if cluster.ranks > 1:
        hit.append(Fault("kill -9 a rank", 1.0, (0, 0), _kill_rank))
    hit.append(Fault("publisher that lies to the relay", 1.0, (10, 20), _lying_publisher))
    hit.append(Fault("replica takes over", 0.6, (0, 0), take_over, alone=True))
    hit.append(Fault("learner on another CPU", 0.6, (0, 0), _other_cpu, alone=True))
    hit.append(Fault("another run of the name", 0.3, (0, 0), _another_run, alone=True))
    return hit


def mild(cluster: Cluster) -> list[Fault]:
    """Returns the faults that every process must outlive."""
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
        *(
            Fault(f"foreign hand: {kind}", 0.5, (0, 0), partial(_foreign_hand, kind))
            for kind in ForeignHand.KINDS
        ),
        Fault("relay that lies", 1.0, (10, 20), _lying_relay),
        Fault("flush Redis", 1.0, (0, 0), flush),
        Fault("Redis a replica", 1.0, (1, 8), replica),
        Fault("second learner", 0.3, (0, 0), _second_learner, alone=True),
        Fault("stop learner beyond its lease", 0.2, (0, 0), _outlast_lease, alone=True),
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


def _kill_rank(cluster: Cluster, rng: random.Random) -> None:
    """Kills one of the learner's processes; torchrun ends the others."""
    if ranks := _ranks(cluster):
        cluster.services["learner"].expected = True
        _tell([rng.choice(ranks)], signal.SIGKILL)


def _ranks(cluster: Cluster) -> list[int]:
    """Returns the learner's processes, which are torchrun's children where there are several; rank 0 first."""
    pid = cluster.services["learner"].pid
    if pid is None or cluster.ranks == 1:
        return [] if pid is None else [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def _tell(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


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

    def undo() -> None:  # by their names, as sockets that nobody holds are collected at once
        sub.close(linger=0)
        dealer.close(linger=0)
        context.term()

    return undo


def _foreign_hand(kind: str, cluster: Cluster, rng: random.Random) -> None:
    run = load(cluster.root / "config.toml", [f"name={RUN}"])
    with quietly(cluster) as client:
        ForeignHand(client, run, rng, cluster.notes).act(kind)


def _lying_publisher(cluster: Cluster, rng: random.Random) -> Undo:
    """The relay follows somebody that changes what the learner says."""
    ends = Endpoints(*(f"tcp://{cluster.host}:{port}" for port in free_ports(2, cluster.host)))
    liar = Liar(cluster.published, ends, random.Random(rng.random()))

    def follow(announce: str, fetch: str) -> None:
        cluster.services["relay"].argv = cluster.relay(announce, fetch)
        _signal("relay", signal.SIGTERM, cluster, rng)

    def undo() -> None:
        liar.close()
        follow(*cluster.published)

    follow(*liar.endpoints)
    return undo


def _lying_relay(cluster: Cluster, rng: random.Random) -> Undo | None:
    """Somebody that changes what the learner says is in the relay's place."""
    if not cluster.services["relay"].wanted:
        return None
    cluster.stop("relay")
    at = Endpoints(cluster.endpoint("relay_announce"), cluster.endpoint("relay_fetch"))
    liar = Liar(cluster.published, at, random.Random(rng.random()))

    def undo() -> None:
        liar.close()
        cluster.services["relay"].wanted = True

    return undo


def garbage(rng: random.Random, good: bytes = b"") -> bytes:
    """Random bytes, or `good` with a few of its bytes changed or its end cut off."""
    if not good or rng.random() < 0.3:
        return rng.randbytes(rng.randrange(200))
    bad = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        bad[rng.randrange(min(len(bad), 64))] = rng.randrange(256)
    return bytes(bad[: rng.randrange(len(bad))] if rng.random() < 0.3 else bad)


def _poison_streams(cluster: Cluster, rng: random.Random) -> None:
    with quietly(cluster) as client:
        for stream in STREAMS:
            client.xadd(
                stream, {rng.choice(("record", "other")): rng.randbytes(rng.randrange(200))}
            )
            client.xadd(stream, {"record": b"\xc1" + rng.randbytes(20)})


def _again(cluster: Cluster, rng: random.Random) -> None:
    """Committed groups are committed once more, and one of a ticket that nobody admitted."""
    with quietly(cluster) as client:
        found: Any = client.xrevrange(KEYS.groups, count=3)
        for _, fields in found:
            client.xadd(KEYS.groups, fields)
            with suppress(RecordError):
                group = decode_group(fields.get(b"record", b""))
                ticket = msgspec.structs.replace(group.ticket, number=FORGED + rng.randrange(10**6))
                forged = msgspec.structs.replace(group, ticket=ticket)
                client.xadd(KEYS.groups, {"record": encode(forged)})


def _other_cpu(cluster: Cluster, rng: random.Random) -> Undo:
    """The learner goes on as on a processor without vector instructions, later as before: each time from its
    last checkpoint, and to other bits."""
    learner = cluster.services["learner"]

    def move(capability: dict[str, str]) -> None:
        learner.env.pop("ATEN_CPU_CAPABILITY", None)
        learner.env.update(capability)
        _signal("learner", signal.SIGKILL, cluster, rng)

    move({"ATEN_CPU_CAPABILITY": "default"})
    return lambda: move({})


def _another_run(cluster: Cluster, rng: random.Random) -> None:
    cluster.next_run()


def _second_learner(cluster: Cluster, rng: random.Random) -> None:
    """One in another directory, which is to be refused and to change nothing."""
    with quietly(cluster) as client:
        before = _leader(client)
        leader = f"process {next(iter(_ranks(cluster)), None)} on host {socket.gethostname()}"
        _refused(cluster, cluster.root / "second", leader)
        if _leader(client) != before:
            cluster.notes.breaches.append("a second learner of the name changed who leads the run")


def _leader(client: redis.Redis) -> list[Any]:
    owner: Any = client.hmget(KEYS.owner, "token", "run_id", "place", "record")
    return [*owner, client.hgetall(KEYS.info)]


def _outlast_lease(cluster: Cluster, rng: random.Random) -> None:
    """The learner is stopped until its lease is over; nobody can follow in its directory, whose lock it has."""
    ranks = _ranks(cluster)
    _tell(ranks, signal.SIGSTOP)
    end = time.monotonic() + LEASE_S + 1.0
    _refused(cluster, cluster.run_root, "a run is going on there")
    while time.monotonic() < end:
        cluster.tend()
        time.sleep(0.1)
    _tell(ranks, signal.SIGCONT)


def _refused(cluster: Cluster, root: Path, words: str) -> None:
    """Starts a learner in `root`, and notes a breach unless it ends by itself, with code 2 and these words."""
    command = subprocess.Popen(
        cluster.learner(root), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    end = time.monotonic() + REFUSED_S
    while command.poll() is None and time.monotonic() < end:
        cluster.tend()
        time.sleep(0.1)
    code = command.poll()
    command.kill()
    said = command.communicate()[0].decode(errors="replace")
    if code != 2 or words not in said:
        last = said.strip().splitlines()[-1:]
        cluster.notes.breaches.append(f"a second learner was not refused: {code}, {last}")


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


def usage(pid: int) -> tuple[int, int] | None:
    """(bytes of resident memory, open files) of a process; None if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            pages = int(file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
