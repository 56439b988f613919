"""A Redis that takes no writes while another takes over, on each kind of server."""

import asyncio
from collections.abc import Callable

import pytest
import redis

from areal_q.messages import Group, Ticket
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
