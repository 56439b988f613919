"""Learner to worker over real sockets: what is received is bit for bit what was published."""

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.weight_sync import (
    LOOPBACK,
    WeightSync,
    arrive,
    assert_same,
    await_true,
    await_version,
    collect_until,
)

from areal_q.config import BroadcastConfig
from areal_q.errors import ConfigError, WeightVersionError
from areal_q.weights.version import WeightVersion
from buffer.weight_sync.version_store import VersionStore

CONFIG = BroadcastConfig(chunk_bytes=1000, timeout_s=1.0)


@pytest.fixture(params=["ipc", "tcp"])
def sync(sync: WeightSync, request: pytest.FixtureRequest) -> WeightSync:
    """Both ends over each transport."""
    sync.server = sync.serve(LOOPBACK if request.param == "tcp" else None)
    return sync


@pytest.mark.parametrize(("workers", "versions"), [(1, 10), (16, 4)])
def test_a_follower_needs_one_fetch_and_then_deltas_only(
    sync: WeightSync, workers: int, versions: int
) -> None:
    subscribers = [sync.follow() for _ in range(workers)]
    for number in range(versions):
        sync.bring(number, *subscribers)
    for subscriber in subscribers:
        assert subscriber.latest() is None, "a version is taken once"
        assert subscriber.stats.fetch.fetches == 1
        assert subscriber.stats.fetch.retries == subscriber.stats.refused == 0
        assert subscriber.stats.received == versions
        assert subscriber.stats.deltas == sync.server.stats.deltas == versions - 1
        assert subscriber.stats.delta_bytes == sync.server.stats.delta_bytes > 0
    assert sync.server.stats.delta_bytes < versions * sync.version(0).manifest.nbytes / 10


def test_a_late_joiner_gets_the_newest_version(sync: WeightSync) -> None:
    for number in range(5):
        sync.server.publish(sync.version(number))
    assert_same(await_version(sync.follow(), 4), sync.version(4))


def test_versions_published_faster_than_taken_are_skipped(sync: WeightSync) -> None:
    subscriber = sync.follow()
    for number in range(50):
        sync.server.publish(sync.version(number))
    seen = collect_until(subscriber, 49)
    numbers = [version.manifest.version for version in seen]
    assert numbers == sorted(set(numbers))
    assert_same(seen[-1], sync.version(49))


def test_wait_returns_the_version_to_an_event_loop(sync: WeightSync) -> None:
    subscriber = sync.follow()

    async def publish_while_waiting() -> WeightVersion:
        waiting = asyncio.create_task(subscriber.wait())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        sync.server.publish(sync.version(7))
        return await waiting

    assert_same(asyncio.run(publish_while_waiting()), sync.version(7))


async def test_wait_raises_when_the_subscriber_is_closed(sync: WeightSync) -> None:
    subscriber = sync.follow()
    waiting = asyncio.create_task(subscriber.wait())
    await asyncio.sleep(0.01)
    subscriber.close()
    with pytest.raises(WeightVersionError, match="stopped"):
        await waiting


def test_the_same_bytes_under_a_new_number_are_not_fetched_again(sync: WeightSync) -> None:
    subscriber = sync.follow()
    sync.bring(1, subscriber)
    sync.server.publish(same := sync.version(1, version=2, epoch="b"))
    arrive(subscriber, same)
    await_true(lambda: subscriber._fetcher.idle, subscriber.stats)
    assert subscriber.stats.fetch.fetches == 1


def test_a_payload_is_never_overwritten_while_a_tensor_views_it(sync: WeightSync) -> None:
    subscriber = sync.follow()
    kept = []
    for number in range(6):
        sync.server.publish(sync.version(number))
        kept.append(await_version(subscriber, number).tensors["codes"])
    for number, codes in enumerate(kept):
        assert torch.equal(codes, sync.version(number).tensors["codes"])
    made = subscriber._fetcher.pool.made
    kept.clear()
    for number in range(6, 30):
        sync.bring(number, subscriber)
    assert subscriber._fetcher.pool.made == made, "buffers that nobody views are reused"


def test_nothing_is_left_behind(sync: WeightSync, short_dir: Path) -> None:
    subscriber = sync.follow()
    sync.bring(1, subscriber)
    subscriber.close()
    sync.server.close()
    sync.server.close()
    assert list(short_dir.iterdir()) == []
    with pytest.raises(WeightVersionError, match="stopped"):
        sync.server.publish(sync.version(2))


def test_an_endpoint_that_cannot_be_bound_is_a_config_error(sync: WeightSync) -> None:
    taken = sync.serve(LOOPBACK).endpoints.fetch
    with pytest.raises(ConfigError, match="cannot bind tcp://127"):
        sync.serve(LOOPBACK._replace(fetch=taken))


def test_the_oldest_fetch_under_way_keeps_its_version(make_version) -> None:
    held = VersionStore(limit=3, lease_s=60.0)
    versions = [make_version(number) for number in range(20)]
    held.add(versions[0])
    for version in versions[1:]:
        assert held.use(versions[0].manifest.digest) is not None
        held.add(version)
    assert held.newest is not None and held.newest.manifest.version == 19
    assert held.use(versions[18].manifest.digest) is not None
    assert held.use(versions[17].manifest.digest) is None
