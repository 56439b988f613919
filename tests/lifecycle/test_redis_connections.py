"""Connections to a real Redis: what is sent, who waits for whom, and how much one read brings."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import redis.asyncio
from helpers.commands import stretched
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.messages import Array, Group, Ticket, VersionSpan
from buffer.redis_store import LearnerBuffer, WorkerBuffer, connection, consumer
from buffer.redis_store.connection import CONNECTIONS, connect_async
from buffer.redis_store.local_server import RedisServer

ARGUMENTS = st.lists(st.one_of(st.text(), st.binary(), st.integers()), min_size=1)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as made:
        yield made


@given(ARGUMENTS, st.lists(st.binary(max_size=10_000), max_size=3))
def test_commands_are_packed_as_redis_py_packs_them(
    arguments: list[str | bytes | int], parts: list[bytes]
):
    last = [b"".join(parts)] if parts else []
    expected = b"".join(redis.asyncio.Connection().pack_command("EVALSHA", *arguments, *last))
    views = [memoryview(part) for part in parts]
    assert b"".join(consumer._packed(["EVALSHA", *arguments], [*views])) == expected


def test_a_commit_outlives_the_loss_of_the_scripts(
    redis_url: str,
    client: redis.Redis,
    make_ticket: Callable[..., Ticket],
    make_group: Callable[..., Group],
):
    learner = LearnerBuffer(redis_url, "run")
    learner.admit([make_ticket(n) for n in range(2)], cursor=2)

    async def work() -> list[bool]:
        worker = WorkerBuffer(redis_url, "run", "w")
        done = []
        for claim in await worker.claim(2, block_s=0.0):
            client.script_flush()
            done.append(await worker.commit(claim, make_group(claim.ticket)))
        await worker.close()
        return done

    assert asyncio.run(work()) == [True, True]
    assert learner.unread() == [0, 1]
    learner.close()


def test_cancelled_calls_give_their_connections_back(redis_url: str):
    async def main() -> None:
        client = connect_async(redis_url)
        waits = [asyncio.ensure_future(client.blpop(["none"], 0)) for _ in range(2 * CONNECTIONS)]
        await asyncio.sleep(0.05)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        sent = [str(i).encode() for i in range(3 * CONNECTIONS)]
        assert await asyncio.gather(*map(client.echo, sent)) == sent
        await client.aclose()

    asyncio.run(main())


def test_a_connection_that_none_gives_back_is_an_error(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 2.0)

    async def main() -> None:
        client = connect_async(redis_url)
        taken = [await client.connection_pool.get_connection() for _ in range(CONNECTIONS)]
        with pytest.raises(redis.ConnectionError, match="No connection available"):
            await client.ping()
        await client.connection_pool.release(taken[0])
        assert await client.ping()
        await client.aclose()

    asyncio.run(main())


def test_a_command_that_redis_does_not_read_times_out(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", stretched(1.0))
    large = b"x" * (8 << 20)

    async def main(server: RedisServer) -> None:
        client = connect_async(server.url)
        await client.ping()
        os.kill(server.process.pid, signal.SIGSTOP)
        with pytest.raises(redis.TimeoutError):
            await client.echo(large)
        os.kill(server.process.pid, signal.SIGCONT)
        monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 30.0)
        patient = connect_async(server.url)
        assert await patient.echo(large) == large
        await client.aclose()
        await patient.aclose()

    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        asyncio.run(main(server))


@pytest.mark.parametrize(("tokens", "reads"), [(2, 2), (20_000, 5)])
def test_a_read_brings_many_small_groups_or_few_large_ones(
    redis_url: str,
    client: redis.Redis,
    make_ticket: Callable[..., Ticket],
    make_group: Callable[..., Group],
    tokens: int,
    reads: int,
):
    """Responses of 20,000 tokens make groups of 360 kB, three of which are a read; the first one is alone."""
    learner = LearnerBuffer(redis_url, "run")
    learner.admit([make_ticket(n) for n in range(12)], cursor=12)

    def grown(group: Group) -> Group:
        columns = {
            "response_ids": Array.of(np.zeros(tokens), "int32"),
            "behavior_logprobs": Array.of(-np.ones(tokens), "float32"),
            "loss_mask": Array.of(np.ones(tokens), "uint8"),
            "spans": [VersionSpan(0, tokens, "a")],
        }
        return replace(group, trajectories=[replace(t, **columns) for t in group.trajectories])

    async def work() -> None:
        worker = WorkerBuffer(redis_url, "run", "w")
        for claim in await worker.claim(12, block_s=0.0):
            assert await worker.commit(claim, grown(make_group(claim.ticket)))
        await worker.close()

    asyncio.run(work())
    client.config_resetstat()
    assert [g.ticket.number for g in learner.take(12, timeout_s=0.0)] == list(range(12))
    assert client.info("commandstats")["cmdstat_xread"]["calls"] == reads
    learner.close()
