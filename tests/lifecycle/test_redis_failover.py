"""A Redis that takes no writes while another takes over, on each kind of server."""

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from helpers.commands import wait_until

from areal_q.messages import Group, Ticket
from areal_q.system.ports import free_ports
from buffer.interface import Claim
from buffer.redis_store import LearnerBuffer, WorkerBuffer

HINDRANCES = {
    "a replica": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "a primary that lacks replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
}
"""What hinders writes, and what lets them through again"""


@pytest.mark.parametrize("hindrance", HINDRANCES)
@pytest.mark.parametrize("kind", ["redis 6.2", "redis 7", "valkey 9"])
async def test_both_sides_wait_while_redis_takes_no_writes(
    kind: str,
    hindrance: str,
    servers: Callable[[str], str],
    make_ticket: Callable[..., Ticket],
    make_group: Callable[..., Group],
    caplog: pytest.LogCaptureFixture,
):
    url = servers(kind)
    learner, worker = LearnerBuffer(url, "run"), WorkerBuffer(url, "run", "w")
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(2)], cursor=2)
    claim, lasting = await worker.claim(2, 0.0)
    begin, end = HINDRANCES[hindrance]
    with redis.Redis.from_url(url) as client:
        client.execute_command(*begin)
        try:
            calls = [
                asyncio.create_task(worker.commit(claim, make_group(claim.ticket))),
                asyncio.create_task(worker.renew([lasting])),
                asyncio.create_task(asyncio.to_thread(learner.admit, [make_ticket(2)], 3)),
            ]
            while caplog.text.count("trying again") < 2:  # one line a side
                await asyncio.sleep(0.01)
                assert not any(call.done() for call in calls)
        finally:
            client.execute_command(*end)
    assert await asyncio.gather(*calls) == [True, [], None]
    assert (learner.unread(), learner.open_tickets()) == ([0], {1, 2})
    await worker.close()
    learner.close()


def started(
    binary: str, place: Path, port: int, stack: ExitStack
) -> tuple[subprocess.Popen[bytes], redis.Redis]:
    """Starts a Redis at a port, for its replica, and at the socket `place`/s. Returns it, and a client."""
    place.mkdir()
    options = ["--port", str(port), "--unixsocket", str(place / "s"), "--dir", str(place)]
    options += ["--save", "", "--repl-diskless-sync-delay", "0"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    client = stack.enter_context(redis.Redis(unix_socket_path=str(place / "s")))
    wait_until(lambda: answers(client), lambda: place, process)
    return process, client


def answers(client: redis.Redis) -> bool:
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


@pytest.mark.parametrize("kind", ["redis 6.2", "redis 7", "valkey 9"])
async def test_a_replica_takes_over_and_each_ticket_counts_once(
    kind: str,
    binary_of: Callable[[str], str],
    short_dir: Path,
    stack: ExitStack,
    make_ticket: Callable[..., Ticket],
    make_group: Callable[..., Group],
    caplog: pytest.LogCaptureFixture,
):
    """Its primary is killed under calls of both sides, and took one group with it that it had confirmed."""
    ports = free_ports(2)
    places = [short_dir / str(port) for port in ports]
    (process, primary), (_, replica) = (
        started(binary_of(kind), place, port, stack)
        for place, port in zip(places, ports, strict=True)
    )
    replica.execute_command("REPLICAOF", "127.0.0.1", ports[0])
    address = short_dir / "address"  # what a name service or Sentinel would be
    address.symlink_to(places[0] / "s")
    url = f"unix://{address}"
    learner, worker = LearnerBuffer(url, "run"), WorkerBuffer(url, "run", "w")
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    claims = await worker.claim(3, 0.0)
    assert await worker.commit(claims[0], make_group(claims[0].ticket))
    wait_until(lambda: replica.info()["master_link_status"] == "up", replica.info)
    # WAIT knows the writes of its own connection alone.
    written = primary.info()["master_repl_offset"]
    wait_until(lambda: replica.info()["slave_repl_offset"] >= written, replica.info)
    replica.execute_command("REPLICAOF", "NO", "ONE")
    assert await worker.commit(claims[1], make_group(claims[1].ticket))
    process.kill()
    calls = [
        asyncio.create_task(worker.commit(claims[2], make_group(claims[2].ticket))),
        asyncio.create_task(asyncio.to_thread(learner.admit, [make_ticket(3)], 4)),
    ]
    while caplog.text.count("trying again") < 2:  # one line a side
        await asyncio.sleep(0.01)
        assert not any(call.done() for call in calls)
    address.unlink()
    address.symlink_to(places[1] / "s")
    assert await asyncio.gather(*calls) == [True, None]
    heir = WorkerBuffer(url, "run", "heir", claim_timeout_s=0.2)
    again: list[Claim] = []
    while len(again) < 2:
        again += await heir.claim(9, 0.05)
    assert {claim.ticket.number for claim in again} == {1, 3}
    assert all([await heir.commit(claim, make_group(claim.ticket)) for claim in again])
    taken = [group.ticket.number for group in learner.take(9, timeout_s=0.0)]
    assert sorted(taken) == [0, 1, 2, 3] and learner.open_tickets() == set()
    for buffer in (worker, heir):
        await buffer.close()
    learner.close()
