"""What Prometheus is told of a learner between two steps, from a real Redis that comes and goes."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from areal_q.observability.metrics_log import has_ended
from areal_q.system.ports import free_ports
from areal_q.system.run_dir import METRICS_FILE
from buffer.redis_store.local_server import RedisServer
from learner.measure import vitals as measure
from learner.measure.vitals import COUNT_EVERY, Vitals

TINY = """
name = "vitals"
steps = 3
model = { type = "small", layers = 1, width = 16, heads = 2, kv_heads = 1, mlp = 16, max_positions = 32 }
task = { type = "arithmetic", digits = 1, heldout = 4 }
rollout = { engine = { type = "scripted" }, sampling = { max_tokens = 4 } }
learner = { groups = 4, group_size = 2 }
eval = { every = 1000, problems = 4 }
"""


@pytest.fixture
def server(short_dir: Path):
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        yield server


def test_vitals_count_workers_and_notice_a_redis_that_died(server: RedisServer, tmp_path: Path):
    told: dict[str, object] = {}
    vitals = Vitals(server.url, "demo", tmp_path, lambda: 7.0, told.update)
    assert told == {"run/ended": 0.0}
    found = vitals.look()
    assert (found["redis/up"], found["workers"], found["buffer/full"]) == (1.0, [], 0.0)
    assert found["buffer/waiting_commits"] == 0
    assert 0 < found["disk/free_bytes"] <= found["disk/size_bytes"]
    server.process.kill()
    server.process.wait()
    found = vitals.look()
    assert found["redis/up"] == 0.0 and "workers" not in found
    assert found["disk/free_bytes"] > 0


def test_what_is_still_to_be_written_is_told_now_and_then(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Enough(Exception):
        pass

    told: list[dict[str, object]] = []

    def record(values: dict[str, object]) -> None:
        told.append(values)
        if len(told) > 2 * COUNT_EVERY:
            raise Enough

    monkeypatch.setattr(measure, "EVERY_S", 0.0)
    with pytest.raises(Enough):
        Vitals(server.url, "demo", tmp_path, lambda: 7.0, record).run()
    ahead = [values["disk/needed_bytes"] for values in told if "disk/needed_bytes" in values]
    assert ahead == [7.0, 7.0]
    assert "disk/needed_bytes" in told[1] and "redis/up" in told[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_learner_stays_until_its_end_was_read(redis_url: str, tmp_path: Path, stack: ExitStack):
    """Prometheus would else not know a finished run from one whose learner died."""
    (tmp_path / "tiny.toml").write_text(TINY)
    metrics, announce, fetch = free_ports(3)
    settings = [f"root={tmp_path}", f"broadcast.announce=tcp://127.0.0.1:{announce}"]
    settings += [f"broadcast.fetch=tcp://127.0.0.1:{fetch}", "--metrics", str(metrics)]

    def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--redis", redis_url, *arguments]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.kill)
        return process

    def exported() -> dict[str, float]:
        with urlopen(f"http://127.0.0.1:{metrics}/metrics") as page:
            families = parse(page.read().decode())
            return {sample.name: sample.value for family in families for sample in family.samples}

    learner = start("learner", "--config", str(tmp_path / "tiny.toml"), *settings)
    while "areal_q_redis_up" not in told(exported):
        assert learner.poll() is None
    assert exported()["areal_q_run_ended"] == 0
    worker = start("rollout", "--run", "vitals", "--id", "w")
    directory = tmp_path / "vitals"
    while not ((directory / METRICS_FILE).exists() and has_ended(directory)):
        assert learner.poll() is None
        time.sleep(0.05)
    assert worker.wait() == 0
    while exported()["areal_q_run_ended"] == 0:
        assert learner.poll() is None
    assert learner.wait() == 0


def told(exported: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Returns what is exported; nothing before the page is there."""
    try:
        return exported()
    except URLError:
        time.sleep(0.05)
        return {}
