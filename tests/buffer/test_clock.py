"""Redis's clock steps back by an hour under claims, whose idle times it reckons by that clock. Real servers."""

import struct
import time
from collections.abc import Callable

import pytest
import redis

from areal_q.messages import Ticket, encode
from bench.records import make_beat
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import WORKER_TTL_S, WORKERS_GROUP, Keys

KEYS = Keys("run")
HOUR_MS = 3600 * 1000


def crc_64(data: bytes) -> int:
    """Redis's checksum of a dump: CRC-64 by Jones."""
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x95AC9329AC4BC9B5 if crc & 1 else 0)
    return crc


def step_back(client: redis.Redis, stream: str) -> None:
    """Leaves claims as they are once the clock has stepped back: an hour later than it is now."""
    dump = client.dump(stream)
    (group,) = client.xinfo_stream(stream, full=True)["groups"]  # pyright: ignore
    assert dump is not None and group["pending"]
    content = dump[:-8]
    for time_ms in {claim[2] for claim in group["pending"]}:
        content = content.replace(struct.pack("<q", time_ms), struct.pack("<q", time_ms + HOUR_MS))
    client.restore(stream, 0, content + struct.pack("<Q", crc_64(content)), replace=True)
    idle_ms = client.xpending_range(stream, WORKERS_GROUP, "-", "+", 100)
    assert all(claim["time_since_delivered"] == 0 for claim in idle_ms)  # pyright: ignore


@pytest.mark.parametrize("kind", ["redis 6.2", "redis 7", "valkey 9"])
async def test_claims_run_out_though_the_clock_stepped_back(
    kind: str, servers: Callable[[str], str], make_ticket: Callable[..., Ticket]
):
    """The heir gets them, and not those of a worker that lives."""
    url = servers(kind)
    learner = LearnerBuffer(url, "run")
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(4)], cursor=4)
    dead, alive = (WorkerBuffer(url, "run", name) for name in ("dead", "alive"))
    heir = WorkerBuffer(url, "run", "heir", claim_timeout_s=0.3)
    heir.max_deliveries = 2
    gone, kept = await dead.claim(2, 0.0), await alive.claim(2, 0.0)
    with redis.Redis.from_url(url) as client:
        step_back(client, KEYS.tickets)
    got: list[int] = []
    while len(got) < len(gone):
        assert await alive.renew(kept) == []
        got += [claim.ticket.number for claim in await heir.claim(9, 0.0)]
    assert sorted(got) == sorted(claim.ticket.number for claim in gone)
    for side in (dead, alive, heir):
        await side.close()
    learner.close()


def test_a_heartbeat_that_outlives_its_worker_is_not_counted(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Keys expire by the clock that stepped back; a worker that lives changes its heartbeat every second."""
    learner = LearnerBuffer(redis_url, "run")

    def beat(name: str, time_s: float) -> None:
        client.sadd(KEYS.workers, name)
        client.set(KEYS.worker(name), encode(make_beat(name, time_s=time_s)), px=HOUR_MS)

    with redis.Redis.from_url(redis_url) as client:
        for name in ("alive", "dead"):
            beat(name, 1.0)
        assert [w.worker for w in learner.workers()] == ["alive", "dead"]
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + WORKER_TTL_S + 1)
        beat("alive", 2.0)
        assert [w.worker for w in learner.workers()] == ["alive"]
        beat("dead", 3.0)
        assert [w.worker for w in learner.workers()] == ["alive", "dead"]
    learner.close()
