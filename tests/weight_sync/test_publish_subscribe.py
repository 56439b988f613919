"""Learner to worker over real sockets: what is received is bit for bit what was published."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers.weight_sync import assert_same, await_true, await_version, follow

from areal_q.config import BroadcastConfig
from areal_q.errors import ConfigError, WeightVersionError
from areal_q.weights import version as weights
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer
from buffer.weight_sync.version_store import VersionStore

Make = Callable[..., WeightVersion]
QUICK = BroadcastConfig(chunk_bytes=1000, timeout_s=1.0)


@pytest.fixture(params=["ipc", "tcp"])
def weight_server(
    request: pytest.FixtureRequest, short_dir: Path, stack: ExitStack
) -> WeightServer:
    if request.param == "ipc":
        made = WeightServer(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f")
    else:
        made = WeightServer("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    stack.callback(made.close)
    return made


def test_a_received_version_is_bit_for_bit_the_published_one(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    for number in range(3):
        published = make_version(number)
        weight_server.publish(published)
        assert_same(await_version(subscriber, number), published)
    assert subscriber.latest() is None, "a version is taken once"
    assert subscriber.stats.received == 3
    assert subscriber.stats.fetch.retries == subscriber.stats.refused == 0


def test_a_late_joiner_gets_the_newest_version(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    for number in range(5):
        weight_server.publish(make_version(number))
    assert_same(await_version(follow(weight_server.endpoints, stack, QUICK), 4), make_version(4))


def test_versions_published_faster_than_taken_are_skipped(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    for number in range(50):
        weight_server.publish(make_version(number))
    seen: list[WeightVersion] = []

    def last_arrived() -> bool:
        if (version := subscriber.latest()) is not None:
            seen.append(version)
        return bool(seen) and seen[-1].manifest.version == 49

    await_true(last_arrived)
    numbers = [version.manifest.version for version in seen]
    assert numbers == sorted(set(numbers))
    assert_same(seen[-1], make_version(49))


def test_wait_returns_the_version_to_an_event_loop(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)

    async def publish_while_waiting() -> WeightVersion:
        waiting = asyncio.create_task(subscriber.wait())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        weight_server.publish(make_version(7))
        return await waiting

    assert_same(asyncio.run(publish_while_waiting()), make_version(7))


def test_wait_raises_when_the_subscriber_is_closed(
    weight_server: WeightServer, stack: ExitStack
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)

    async def close_while_waiting() -> None:
        waiting = asyncio.create_task(subscriber.wait())
        await asyncio.sleep(0.01)
        subscriber.close()
        with pytest.raises(WeightVersionError, match="stopped"):
            await waiting

    asyncio.run(close_while_waiting())


def test_a_restarted_learner_with_lower_numbers_is_followed(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    endpoints = f"ipc://{short_dir}/a", f"ipc://{short_dir}/f"
    first = WeightServer(*endpoints)
    subscriber = follow(first.endpoints, stack, QUICK)
    first.publish(make_version(9))
    await_version(subscriber, 9)
    first.close()
    second = WeightServer(*endpoints)
    stack.callback(second.close)
    second.publish(make_version(3, epoch="b"))
    assert_same(await_version(subscriber, 3), make_version(3, epoch="b"))
    assert subscriber.stats.epochs == 2


def test_the_same_bytes_under_a_new_number_are_not_fetched_again(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    first = make_version(1)
    weight_server.publish(first)
    await_version(subscriber, 1)
    same = weights.pack(
        first.tensors,
        run="run",
        epoch="b",
        version=2,
        format="int8",
        uaq_scale=1.5,
        model={},
        published_s=0.0,
    )
    weight_server.publish(same)
    assert_same(await_version(subscriber, 2), same)
    assert subscriber.stats.fetch.fetches == 1


def test_a_payload_is_never_overwritten_while_a_tensor_views_it(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    kept = []
    for number in range(6):
        weight_server.publish(make_version(number))
        kept.append(await_version(subscriber, number).tensors["codes"])
    for number, codes in enumerate(kept):
        assert torch.equal(codes, make_version(number).tensors["codes"])
    made = subscriber._fetcher.pool.made
    kept.clear()
    for number in range(6, 30):
        weight_server.publish(make_version(number))
        await_version(subscriber, number)
    assert subscriber._fetcher.pool.made == made, "buffers that nobody views are reused"


def test_nothing_is_left_behind(short_dir: Path, stack: ExitStack, make_version: Make) -> None:
    weight_server = WeightServer(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f")
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    weight_server.publish(make_version(1))
    await_version(subscriber, 1)
    subscriber.close()
    weight_server.close()
    weight_server.close()
    assert list(short_dir.iterdir()) == []
    with pytest.raises(WeightVersionError, match="stopped"):
        weight_server.publish(make_version(2))


def test_an_endpoint_that_cannot_be_bound_is_a_config_error(stack: ExitStack) -> None:
    first = WeightServer("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    stack.callback(first.close)
    with pytest.raises(ConfigError, match="cannot bind tcp://127"):
        WeightServer("tcp://127.0.0.1:0", first.endpoints.fetch)


def test_a_follower_needs_one_fetch_and_then_deltas_only(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    for number in range(10):
        weight_server.publish(make_version(number))
        assert_same(await_version(subscriber, number), make_version(number))
    assert subscriber.stats.fetch.fetches == 1
    assert subscriber.stats.deltas == weight_server.stats.deltas == 9
    assert subscriber.stats.delta_bytes == weight_server.stats.delta_bytes > 0
    assert weight_server.stats.last_version_bytes < make_version(9).manifest.nbytes / 10


def test_a_delta_over_the_limit_is_announced_and_fetched(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    weight_server = WeightServer(
        f"ipc://{short_dir}/a",
        f"ipc://{short_dir}/f",
        BroadcastConfig(max_delta_bytes=1000, heartbeat_s=30.0),
    )
    stack.callback(weight_server.close)
    subscriber = follow(weight_server.endpoints, stack, QUICK)
    weight_server.publish(make_version(1))
    await_version(subscriber, 1)
    other = weights.pack(
        {n: torch.zeros_like(t) for n, t in make_version(1).tensors.items()}
        | {
            "codes": torch.arange(300 * 77)
            .mul(40503)
            .bitwise_right_shift(7)
            .to(torch.int8)
            .view(300, 77)
        },
        run="run",
        epoch="a",
        version=2,
        format="int8",
        uaq_scale=1.0,
        model={},
        published_s=0.0,
    )
    weight_server.publish(other)
    assert_same(await_version(subscriber, 2), other)
    assert weight_server.stats.deltas == 0
    assert subscriber.stats.fetch.fetches == 2


def test_sixteen_subscribers_are_served_by_the_same_delta(
    weight_server: WeightServer, stack: ExitStack, make_version: Make
) -> None:
    subscribers = [follow(weight_server.endpoints, stack, QUICK) for _ in range(16)]
    for number in range(4):
        weight_server.publish(make_version(number))
        for subscriber in subscribers:
            assert_same(await_version(subscriber, number), make_version(number))
    assert weight_server.stats.deltas == 3
    assert sum(r.stats.fetch.fetches for r in subscribers) == 16


def test_the_oldest_fetch_under_way_keeps_its_version(make_version: Make) -> None:
    held = VersionStore(limit=3, lease_s=60.0)
    versions = [make_version(number) for number in range(20)]
    held.add(versions[0])
    for version in versions[1:]:
        assert held.use(versions[0].manifest.digest) is not None
        held.add(version)
    assert held.newest is not None and held.newest.manifest.version == 19
    assert held.use(versions[18].manifest.digest) is not None
    assert held.use(versions[17].manifest.digest) is None
