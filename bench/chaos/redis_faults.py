"""Faults of Redis itself: it forgets, takes no writes, or ends while a replica follows."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis

from areal_q.errors import RecordError
from areal_q.messages import Ticket, decode_group, decode_ticket
from areal_q.system.ports import free_ports
from bench.chaos.cluster import RUN, Cluster, Service, redis_server
from buffer.redis_store.keys import RECORD, Keys

KEYS = Keys(RUN)
FOLLOWS_S = 60.0
"""The longest that a replica may take to follow"""


@contextmanager
def quietly(cluster: Cluster) -> Iterator[redis.Redis]:
    """A client whose errors are nobody's: Redis itself may be the one that is being hit."""
    with suppress(redis.RedisError), cluster.client() as client:
        yield client


def replica(cluster: Cluster, rng: random.Random) -> Callable[[], None]:
    """Redis takes no writes, as one that another is to follow or that has just followed."""

    def of(*primary: str) -> None:
        cluster.services["redis"].send(signal.SIGCONT)  # it would answer nobody
        with quietly(cluster) as client:
            client.execute_command("REPLICAOF", *primary)

    of(cluster.host, "1")
    return lambda: of("NO", "ONE")


def flush(cluster: Cluster, rng: random.Random) -> None:
    """Redis forgets everything; what it held at that moment is noted in the same transaction."""
    with quietly(cluster) as client:
        client.ping()  # one that is stopped would do it later, unnoticed
        with client.pipeline(transaction=True) as pipe:
            pipe.xrange(KEYS.tickets)
            pipe.xrange(KEYS.groups)
            pipe.flushall()
            tickets, groups, flushed = pipe.execute(raise_on_error=False)
        if flushed is True:
            cluster.notes.flushed |= _numbers(tickets, groups)
            cluster.notes.spoiled.clear()


def take_over(cluster: Cluster, rng: random.Random) -> None:
    """Redis ends by kill -9, and its address is from then on that of its replica, which lacks its last writes.

    Redis 6.2 cannot move to another port: the replica starts anew at this one, with its own append-only file.
    """
    service = cluster.services["redis"]
    directory, port = cluster.root / "redis" / f"{service.starts}", free_ports(1, cluster.host)[0]
    command = redis_server(directory, cluster.host, port)
    heir = Service("replica", command, service.log, service.env)
    heir.start()
    try:
        with quietly(cluster) as primary, redis.Redis(cluster.host, port) as follower:
            _await_following(cluster, primary, follower)
            follower.execute_command("REPLICAOF", "NO", "ONE")
            lose_writes(rng.uniform(0.0, 0.5))
            primary.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            _note(cluster, primary, follower)
            _end(service, signal.SIGKILL)
            _end(heir, signal.SIGTERM)
            service.argv = redis_server(directory, cluster.host, cluster.ports["redis"])
    finally:
        _end(heir, signal.SIGKILL)


def lose_writes(seconds: float) -> None:
    """Lets others write so long what nobody else will have."""
    time.sleep(seconds)


def _await_following(cluster: Cluster, primary: redis.Redis, follower: redis.Redis) -> None:
    """Returns once `follower` has all that `primary` had then, in its file as well. Raises redis.TimeoutError
    after FOLLOWS_S."""
    end, told = time.monotonic() + FOLLOWS_S, False
    while time.monotonic() < end:
        with suppress(redis.ConnectionError):  # it is starting
            if not told:
                told = bool(follower.replicaof(cluster.host, cluster.ports["redis"]))
            written, has = primary.info()["master_repl_offset"], follower.info()
            there = has.get("master_link_status") == "up" and has["slave_repl_offset"] >= written
            if there and not has["aof_rewrite_in_progress"] + has["aof_rewrite_scheduled"]:
                return
        cluster.tend()
        time.sleep(0.05)
    raise redis.TimeoutError(f"the replica did not follow within {FOLLOWS_S:.0f} s")


def _note(cluster: Cluster, primary: redis.Redis, follower: redis.Redis) -> None:
    """Notes the tickets that `follower` has never had, and those whose groups it has never had."""
    lost, kept = (
        [_numbers(client.xrange(stream)) for stream in (KEYS.tickets, KEYS.groups)]
        for client in (primary, follower)
    )
    cluster.notes.flushed |= lost[0].union(lost[1]) - kept[0].union(kept[1])
    cluster.notes.moved |= lost[1] & kept[0]
    cluster.notes.spoiled.clear()


def _end(service: Service, number: signal.Signals) -> None:
    service.send(number)
    if service.process:
        service.process.wait()


def _numbers(*streams: Any) -> set[int]:
    """Returns the ticket numbers of the entries of streams of tickets or groups."""
    found = set()
    for _, fields in (entry for entries in streams for entry in entries):
        record = fields.get(RECORD, b"")
        for decode in (decode_ticket, decode_group):
            with suppress(RecordError):
                taken = decode(record)
                found.add(taken.number if isinstance(taken, Ticket) else taken.ticket.number)
    return found
