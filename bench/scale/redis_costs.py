"""What Redis spends on each thing that a run asks of it: processor seconds of a real server, measured.

Through the buffer's own two sides, append-only file on. A server's processor time does not depend on who else
uses the machine as wall time does, and Redis runs commands on one thread: it is full where the sum is 1 s/s.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import redis

from areal_q.messages import Array, Group, Ticket, VersionSpan, encode
from bench.records import make_beat, make_group, make_ticket, make_trajectory
from buffer.redis_store import Claim, LearnerBuffer, WorkerBuffer
from buffer.redis_store.local_server import RedisServer

GROUP_SIZE = 16
GROUPS = 256
BEATS = 2000
ROUNDS = 3
BATCH = 8
"""Tickets claimed at once"""


@dataclass(frozen=True)
class RedisCosts:
    """Processor seconds of the server."""

    group_s: float
    """A group of no size: its ticket admitted and claimed, committed, read, trimmed"""
    byte_s: float
    """And for each of its bytes"""
    beat_s: float
    """A worker's heartbeat, and the renewal of BATCH claims"""
    read_byte_s: float = 0.0
    """The learner's own, for each byte that it reads, decodes and checks"""

    def of_group(self, nbytes: float) -> float:
        return self.group_s + self.byte_s * nbytes


def measure() -> RedisCosts:
    small, large = 20, 2000
    with (
        tempfile.TemporaryDirectory() as directory,
        RedisServer.start(Path(directory), Path(directory, "s")) as server,
    ):
        # Whatever else the machine does only adds.
        (a, _, a_bytes), (b, read_s, b_bytes) = (
            min(_groups(server, n) for _ in range(ROUNDS)) for n in (small, large)
        )
        beat_s = asyncio.run(_beats(server))
    byte_s = (b - a) / (b_bytes - a_bytes)
    # What is left for a group of no size may still be less than the noise.
    return RedisCosts(max(0.0, a - byte_s * a_bytes), byte_s, beat_s, read_s / b_bytes)


def group_bytes(tokens: int, group_size: int = GROUP_SIZE) -> int:
    """Returns the size of the record of a group whose responses have `tokens` tokens each."""
    return len(encode(_group(_ticket(0, group_size), tokens)))


def _groups(server: RedisServer, tokens: int) -> tuple[float, float, int]:
    """Returns the processor seconds of a group, those of the learner that reads it, and its bytes."""
    tickets = [_ticket(n, GROUP_SIZE) for n in range(GROUPS)]
    groups = [_group(ticket, tokens) for ticket in tickets]
    learner = LearnerBuffer(server.url, f"cost-{tokens}")
    learner.publish_run("", {})
    before = _cpu_s(server)
    learner.admit(tickets, cursor=GROUPS)
    asyncio.run(_commit_all(server, learner.keys.run, groups))
    began = time.process_time()
    taken = learner.take(GROUPS, timeout_s=30.0)
    read_s = time.process_time() - began
    learner.trim(learner.position)
    spent = _cpu_s(server) - before
    learner.close()
    assert len(taken) == GROUPS
    return spent / GROUPS, read_s / GROUPS, len(encode(groups[0]))


async def _commit_all(server: RedisServer, run: str, groups: list[Group]) -> None:
    worker = WorkerBuffer(server.url, run, "w")
    left = len(groups)
    while left:
        for claim in await worker.claim(BATCH, block_s=1.0):
            assert await worker.commit(claim, groups[claim.ticket.number])
            left -= 1
    await worker.close()


async def _beats(server: RedisServer) -> float:
    learner = LearnerBuffer(server.url, "beats")
    learner.publish_run("", {})
    learner.admit([_ticket(n, GROUP_SIZE) for n in range(BATCH)], cursor=BATCH)
    worker = WorkerBuffer(server.url, "beats", "w")
    claims: list[Claim] = await worker.claim(BATCH, block_s=1.0)
    status = make_beat()
    before = _cpu_s(server)
    for _ in range(BEATS):
        await worker.renew(claims)
        await worker.heartbeat(status)
    spent = _cpu_s(server) - before
    await worker.close()
    learner.close()
    return spent / BEATS


def _cpu_s(server: RedisServer) -> float:
    with redis.Redis.from_url(server.url) as client:
        found: Any = client.info("cpu")
    return found["used_cpu_user"] + found["used_cpu_sys"]


def _ticket(number: int, group_size: int) -> Ticket:
    prompt_ids = Array.of(np.arange(64), "int32")
    return make_ticket(number, prompt="p" * 200, group_size=group_size, prompt_ids=prompt_ids)


def _group(ticket: Ticket, tokens: int) -> Group:
    rng = np.random.default_rng(ticket.number)
    spans = [VersionSpan(0, tokens, "0" * 32)]
    answers = [
        make_trajectory(i, rng.integers(0, 1 << 17, tokens), -rng.random(tokens), spans=spans)
        for i in range(ticket.group_size)
    ]
    return make_group(ticket, trajectories=answers)
