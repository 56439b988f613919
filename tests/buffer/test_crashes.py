"""The Redis buffer under kill -9, restarts, lost answers, a full server and poison."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import redis
from helpers.commands import stretched
from msgspec.structs import replace

from areal_q.errors import BufferFull, BufferUnavailable
from areal_q.messages import PartialGroup, encode
from bench.records import make_beat
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import Keys
from buffer.redis_store.lease import owner_of
from buffer.redis_store.local_server import RedisServer

KEYS = Keys("run")
CLAIMER = """
import asyncio, json, sys, time
from buffer.redis_store import WorkerBuffer

async def main(url):
    worker = WorkerBuffer(url, "run", "victim")
    claims = await worker.claim(3, block_s=10.0)
    print(json.dumps([c.ticket.number for c in claims]), flush=True)
    await asyncio.sleep(60)

asyncio.run(main(sys.argv[1]))
"""
RACER = """
import asyncio, sys
from areal_q.messages import Array, Group, Trajectory, VersionSpan
from buffer.redis_store import WorkerBuffer

def answer(ticket, index):
    return Trajectory(
        index=index, response_ids=Array.of([1], "int32"), behavior_logprobs=Array.of([-1], "float32"),
        loss_mask=Array.of([1], "uint8"), spans=[VersionSpan(0, 1, "a")], finish_reason="stop", reward=0.0,
    )

async def main(url, name):
    worker = WorkerBuffer(url, "run", name, claim_timeout_s=0.003)
    worker.max_deliveries = 10**6
    won = idle = 0
    while idle < 30:
        claims = await worker.claim(4, block_s=0.0)
        idle = 0 if claims else idle + 1
        await asyncio.sleep(0.005)
        for claim in claims:
            group = Group(
                ticket=claim.ticket, worker=name, engine="e", weight_format="int8",
                trajectories=[answer(claim.ticket, i) for i in range(2)], started_s=0.0, finished_s=0.0,
            )
            won += await worker.commit(claim, group)
    await worker.close()
    print(won)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def learner(redis_url):
    made = LearnerBuffer(redis_url, "run")
    yield made
    made.close()


async def test_kill_9_after_a_claim_gives_the_ticket_to_another(
    learner, redis_url, make_ticket, make_group
):
    learner.admit([make_ticket(n) for n in range(4)], cursor=4)
    command = [sys.executable, "-c", CLAIMER, redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert json.loads(victim.stdout.readline()) == [0, 1, 2]
        victim.send_signal(signal.SIGKILL)
    worker = WorkerBuffer(redis_url, "run", "heir", claim_timeout_s=0.4)
    got = await worker.claim(9, 0.0)
    while len(got) < 4:
        got += await worker.claim(9, block_s=1.0)
        await worker.renew(got)
    assert sorted(c.ticket.number for c in got) == [0, 1, 2, 3]
    for claim in got:
        assert await worker.commit(claim, make_group(claim.ticket))
    await asyncio.sleep(0.5)
    await worker.claim(1, 0.0)
    await worker.close()
    assert sorted(learner.unread()) == [0, 1, 2, 3]
    with redis.Redis.from_url(redis_url) as client:
        left = client.xinfo_consumers(KEYS.tickets, "workers")
    assert not [c for c in left if c["name"].startswith(b"victim")]  # the dead worker is forgotten


def test_an_admission_repeated_after_a_lost_answer_admits_once(learner, client, make_ticket):
    names = []
    original = learner._connection._scripts["ADMIT"]

    def answer_lost(keys, args):
        names.append(args[1])
        original(keys, args)
        if len(names) < 3:
            raise redis.ConnectionError("the answer was lost")

    learner._connection._scripts["ADMIT"] = answer_lost
    learner.admit([make_ticket(n) for n in range(5)], cursor=5)
    assert len(names) == 3
    assert client.xlen(KEYS.tickets) == 5


def test_admission_and_cursor_change_together_or_not_at_all(learner, client, make_ticket):
    learner.admit([make_ticket(0)], cursor=1)
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BufferUnavailable, match="refuses writes"):
            learner.admit([make_ticket(1)], cursor=2)
    finally:
        client.config_set("maxmemory", 0)
    assert (learner.cursor(), learner.open_tickets()) == (1, {0})


async def test_a_full_redis_makes_commit_wait_and_loses_nothing(
    learner, client, redis_url, make_ticket, make_group
):
    learner.admit([make_ticket(0)], cursor=1)
    timeout_s = stretched(1.0)
    worker, other = (
        WorkerBuffer(redis_url, "run", name, claim_timeout_s=timeout_s) for name in ("w", "other")
    )
    [claim] = await worker.claim(1, 0.0)
    client.config_set("maxmemory", 1)
    try:
        commit = asyncio.create_task(worker.commit(claim, make_group(claim.ticket)))
        await asyncio.sleep(2.2 * timeout_s)
        while not (worker.waiting or commit.done()):  # the next try is under way
            await asyncio.sleep(0.01)
        assert not commit.done() and worker.waiting == 1
        assert await other.claim(1, 0.0) == []  # it is still the waiting worker's
        assert learner.claims() == (1, {"w": 1})
    finally:
        client.config_set("maxmemory", 0)
    assert await commit
    assert worker.waiting == 0
    await worker.close()
    await other.close()
    assert learner.unread() == [0]


def test_a_redis_whose_disk_is_gone_is_waited_for_by_both_sides(short_dir, make_ticket, make_group):
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        learner = LearnerBuffer(server.url, "run", patience_s=30.0)
        learner.publish_run("x = 1", {})
        learner.admit([make_ticket(n) for n in range(2)], cursor=2)
        learner.position = "1-0"
        with redis.Redis.from_url(server.url) as client:

            async def work():
                worker = WorkerBuffer(server.url, "run", "w", patience_s=30.0)
                [claim] = await worker.claim(1, 0.0)
                lose_disk(client, short_dir / "redis")
                with pytest.raises(BufferFull):
                    learner.admit([make_ticket(2)], cursor=3)
                waiting = [
                    asyncio.create_task(work)
                    for work in (
                        worker.claim(1, 0.0),
                        worker.renew([claim]),
                        worker.commit(claim, make_group(claim.ticket)),
                        asyncio.to_thread(learner.trim, "1-0"),
                        asyncio.to_thread(learner.publish_run, "x = 2", {}),
                    )
                ]
                await asyncio.sleep(0.5)
                assert not [task for task in waiting if task.done()]
                (short_dir / "new").mkdir()
                client.config_set("dir", str(short_dir / "new"))
                client.bgsave()
                claims, _, committed, *_ = await asyncio.gather(*waiting)
                assert ([c.ticket.number for c in claims], committed) == ([1], True)  # pyright: ignore
                await worker.close()

            asyncio.run(work())
        assert learner.unread() == [0]
        learner.close()


def lose_disk(client, directory):
    """Until it can save again, this Redis refuses every write (MISCONF)."""
    client.config_set("appendonly", "no")
    client.config_set("save", "3600 1")
    shutil.rmtree(directory)
    client.bgsave()
    while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        time.sleep(0.02)


def test_poison_groups_go_to_the_quarantine_and_do_not_count(
    learner, client, redis_url, make_ticket, make_group
):
    invalid = make_group(make_ticket(1), trajectories=[])
    client.xadd(KEYS.groups, {"record": b"\xc1 not msgpack"})
    client.xadd(KEYS.groups, {"record": encode(make_group(make_ticket(0)))})
    client.xadd(KEYS.groups, {"record": encode(invalid)})
    client.xadd(KEYS.groups, {"foreign": b"x"})
    client.xadd(KEYS.groups, {"record": encode(make_group(make_ticket(2)))})
    client.xadd(KEYS.eval_groups, {"record": b"\x00"})
    assert [g.ticket.number for g in learner.take(2, 0.0)] == [0, 2]
    assert learner.take_eval() == []
    assert learner.quarantined_total() == 4
    assert client.xlen(KEYS.groups) == 2
    kept = [fields for _, fields in client.xrange(KEYS.quarantine)]
    assert [f[b"source"].decode() for f in kept] == [KEYS.groups] * 3 + [KEYS.eval_groups]
    assert kept[0][b"record"] == b"\xc1 not msgpack"
    assert b"responses asked for" in kept[1][b"reason"]


async def test_no_key_is_left_that_keys_py_does_not_name(
    learner, client, redis_url, make_ticket, make_group, tmp_path
):
    learner.acquire(owner_of("id", tmp_path))
    learner.publish_run("", {})
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    learner.admit_eval([make_ticket(0, purpose="eval")])
    client.xadd(KEYS.groups, {"record": b"\xc1"})
    worker = WorkerBuffer(redis_url, "run", "w")
    *claims, last = await worker.claim(9, 0.0)
    for claim in claims:
        await worker.commit(claim, make_group(claim.ticket))
    await worker.release([replace(last, partial=PartialGroup(ticket=0, responses=[]))])
    await worker.heartbeat(make_beat())
    await worker.close()
    learner.take(9, 0.0)
    learner.take_eval()
    found = {key.decode() for key in client.keys("*")}
    assert found == {*KEYS.fixed, KEYS.worker("w").decode()}
    assert 0 < client.ttl(KEYS.worker("w")) <= 10
    client.delete(KEYS.worker("w"))
    assert learner.workers() == []
    learner.forget()
    assert client.keys("*") == [KEYS.owner.encode()]


async def test_a_committed_group_survives_kill_9_of_the_server(short_dir, make_ticket, make_group):
    server = RedisServer.start(short_dir / "redis", short_dir / "s", appendfsync="always")
    learner = LearnerBuffer(server.url, "run", patience_s=20.0)
    learner.publish_run("x = 1", {})
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    servers = [server]
    try:
        worker = WorkerBuffer(server.url, "run", "w", patience_s=20.0)
        claims = await worker.claim(2, 0.0)
        assert await worker.commit(claims[0], make_group(claims[0].ticket))
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        second = asyncio.create_task(worker.commit(claims[1], make_group(claims[1].ticket)))
        await asyncio.sleep(0.3)
        assert not second.done()
        servers.append(RedisServer.start(short_dir / "redis", short_dir / "s"))
        assert await second
        assert [c.ticket.number for c in await worker.claim(9, 0.0)] == [2]
        await worker.close()
        assert [g.ticket.number for g in learner.take(9, 0.0)] == [0, 1]
        assert (learner.cursor(), learner.open_tickets()) == (3, {2})
    finally:
        learner.close()
        for each in servers:
            each.stop()


async def test_patience_ends_in_an_error_that_names_no_password(short_dir, make_ticket):
    url = f"unix://:secret@{short_dir}/nobody"
    learner = LearnerBuffer(url, "run", patience_s=0.1)
    with pytest.raises(BufferUnavailable) as caught:
        learner.admit([make_ticket(0)], cursor=1)
    assert "secret" not in str(caught.value)
    learner.close()
    worker = WorkerBuffer(url, "run", "w", patience_s=0.1)
    with pytest.raises(BufferUnavailable):
        await worker.claim(1, 0.0)
    await worker.close()


def test_many_processes_race_and_each_ticket_becomes_one_group(learner, redis_url, make_ticket):
    learner.admit([make_ticket(n) for n in range(60)], cursor=60)
    command = [sys.executable, "-c", RACER, redis_url]
    racers = [
        subprocess.Popen([*command, f"w{i}"], stdout=subprocess.PIPE, text=True) for i in range(3)
    ]
    won = []
    for racer in racers:
        output, _ = racer.communicate()
        assert racer.returncode == 0
        won.append(int(output))
    assert sum(won) == 60
    assert sorted(g.ticket.number for g in learner.take(100, 0.0)) == list(range(60))
