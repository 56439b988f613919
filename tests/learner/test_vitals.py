"""What Prometheus is told of a learner between two steps, from a real Redis that comes and goes."""

from pathlib import Path

import pytest

from buffer.redis_store.local_server import RedisServer
from learner.measure.vitals import Vitals


@pytest.fixture
def server(short_dir: Path):
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        yield server


def test_vitals_count_workers_and_notice_a_redis_that_died(server: RedisServer, tmp_path: Path):
    told: dict[str, object] = {}
    vitals = Vitals(server.url, "demo", tmp_path, told.update)
    assert told == {"run/ended": 0.0}
    found = vitals.look()
    assert (found["redis/up"], found["workers"], found["buffer/full"]) == (1.0, [], 0.0)
    assert 0 < found["disk/free_bytes"] <= found["disk/size_bytes"]
    server.process.kill()
    server.process.wait()
    found = vitals.look()
    assert found["redis/up"] == 0.0 and "workers" not in found
    assert found["disk/free_bytes"] > 0
