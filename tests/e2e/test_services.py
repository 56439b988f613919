"""Learner and worker as services of their own: over TCP, with a password-protected Redis, no launcher."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis
from helpers.commands import limit, wait_until
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from areal_q.config import dump_toml, load
from areal_q.errors import BufferUnavailable, ConfigError
from areal_q.observability.metric_table import METRICS, WORKER_METRICS
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.observability.prometheus_exporter import PREFIX, Exporter
from areal_q.system import run_dir
from areal_q.system.credentials import redis_password
from areal_q.system.ports import free_ports
from buffer.redis_store import LearnerBuffer
from buffer.redis_store.keys import Keys
from buffer.redis_store.local_server import find_binary
from learner.build import reached_at

PASSWORD = "correct horse"
TINY = """
name = "services"
steps = 3
[model]
type = "small"
layers = 1
width = 16
heads = 2
kv_heads = 1
mlp = 16
max_positions = 32
[task]
type = "arithmetic"
digits = 1
heldout = 4
[rollout.engine]
type = "scripted"
[rollout.sampling]
max_tokens = 4
[learner]
groups = 4
group_size = 2
[eval]
every = 1000
problems = 4
"""


@pytest.fixture
def locked_redis(tmp_path: Path) -> Iterator[str]:
    """URL, without the password, of a real Redis on loopback that asks for it."""
    port = free_ports(1)[0]
    settings = f'port {port}\nbind 127.0.0.1\nrequirepass "{PASSWORD}"\nsave ""\ndir {tmp_path}\n'
    server = subprocess.Popen(
        [find_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert server.stdin
    server.stdin.write(settings.encode())
    server.stdin.close()
    with redis.Redis(port=port, password=PASSWORD) as client:
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert server.poll() is None and time.monotonic() < limit.at_s
                time.sleep(0.02)
    yield f"redis://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture
def password_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    monkeypatch.setenv("REDIS_PASSWORD_FILE", str(path))
    return path


def test_the_password_comes_from_a_file(locked_redis, password_file):
    buffer = LearnerBuffer(locked_redis, "run")
    assert buffer.cursor() is None
    buffer.close()


@pytest.mark.parametrize("written", [None, "another"])
def test_without_the_right_password_it_fails_at_once(
    locked_redis, password_file, monkeypatch, written
):
    if written is None:
        monkeypatch.delenv("REDIS_PASSWORD_FILE")
    else:
        password_file.write_text(written)
    buffer = LearnerBuffer(locked_redis, "run", patience_s=1e6)
    with pytest.raises(BufferUnavailable) as refused:
        buffer.cursor()
    assert "another" not in str(refused.value)
    buffer.close()


def test_a_unix_socket_needs_no_password(redis_url, password_file):
    buffer = LearnerBuffer(redis_url, "run")
    assert buffer.cursor() is None
    buffer.close()


@pytest.mark.parametrize(("text", "named"), [(None, "No such file"), (" \n", "is empty")])
def test_a_password_file_that_cannot_be_used_is_named(password_file, text, named):
    password_file.unlink()
    if text is not None:
        password_file.write_text(text)
    with pytest.raises(ConfigError, match=f"REDIS_PASSWORD_FILE.*{named}"):
        redis_password("redis://somewhere")


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5551", "tcp://*:5551", "tcp://[::]:5551"])
def test_every_interface_needs_a_name_to_be_reached_by(endpoint):
    with pytest.raises(ConfigError, match=r"broadcast\.host"):
        load(None, [f"broadcast.fetch={endpoint}"])
    run = load(None, [f"broadcast.fetch={endpoint}", "broadcast.host=learner"])
    assert reached_at(endpoint, run.broadcast.host) == "tcp://learner:5551"


def test_endpoints_stay_as_they_are_bound_without_a_host():
    assert reached_at("tcp://127.0.0.1:5551", None) == "tcp://127.0.0.1:5551"
    assert reached_at("ipc:///tmp/x", "learner") == "ipc:///tmp/x"


def test_service_resumes_from_a_checkpoint_with_fitting_settings(tmp_path):
    run = load(None, [f"root={tmp_path}", "name=demo"])
    assert not run_dir.resumes(run)
    (tmp_path / "demo" / "checkpoints" / "step-3").mkdir(parents=True)
    (tmp_path / "demo" / "config.toml").write_text(dump_toml(run))
    assert run_dir.resumes(run)
    longer = [f"root={tmp_path}", "name=demo", "steps=900", "broadcast.host=elsewhere"]
    assert run_dir.resumes(load(None, longer))
    with pytest.raises(ConfigError, match=r"learner\.group_size"):
        run_dir.resumes(load(None, [*longer, "learner.group_size=2"]))


@pytest.mark.parametrize(
    "args", [[], ["--config", "a", "--run-dir", "b"], ["--run-dir", "b", "steps=3"]]
)
def test_a_learner_is_told_either_settings_or_a_directory(args):
    command = [sys.executable, "-m", "learner", "--redis", "redis://nowhere", *args]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        "learner: either --config CONFIG [a.b=c]... or --run-dir DIR is needed"
    )


def assert_every_line_is_exported(table, exporter: Exporter, records: list[Record]) -> None:
    """A real run's records fill every line of the table: none asks for a key that nobody writes. Routes are
    for models with experts alone, and sets, sources, teachers and held-out losses for runs that have them; the
    others are told between records (learner/measure/vitals.py) or judged from them
    (areal_q/observability/learning_faults.py)."""
    elsewhere = ("routing/", "run/", "disk/", "redis/up", "fault/")
    elsewhere += ("eval/*", "eval/loss", "source/", "teacher/")
    for record in records:
        exporter.update(record)
    page = generate_latest(exporter).decode()  # a Collector is all that it asks for
    filled = {sample.name for family in parse(page) for sample in family.samples}
    always = [m for m in table if m.exported and not m.key.startswith(elsewhere)]
    assert filled == {PREFIX + metric.exported for metric in always}


def scraped(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return page.read().decode()


def groups_committed(exported: str) -> float:
    """Returns what the exporter of worker `w` says, 0 before its first heartbeat."""
    found = re.search(r'areal_q_worker_groups_total\{run="services",worker="w"\} (\S+)', exported)
    return float(found[1]) if found else 0.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_outlives_a_stopped_learner_not_its_run(locked_redis, password_file, tmp_path):
    """Three lives of the learner over TCP, each at other ports: told to go, then finished, then taken up again
    with more steps. Every exit code is what a service manager has to know."""
    (tmp_path / "tiny.toml").write_text(TINY)
    settings = [f"root={tmp_path}", "broadcast.host=localhost"]
    environment = {**os.environ, "REDIS_URL": locked_redis, "OMP_NUM_THREADS": "1"}
    said = (tmp_path / "said").open("w+")
    started = []

    def start(*args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *args]
        started.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        return started[-1]

    def learn(*overrides: str) -> tuple[subprocess.Popen[bytes], tuple[int, int]]:
        """The learner, and the ports that it is reached at."""
        announce, fetch = free_ports(2)
        ports = announce, fetch
        overrides += tuple(
            f"broadcast.{kind}=tcp://127.0.0.1:{port}"
            for kind, port in zip(("announce", "fetch"), ports, strict=True)
        )
        config = ["--config", str(tmp_path / "tiny.toml")]
        return start("learner", *config, *settings, *overrides), ports

    def work(*options: str) -> subprocess.Popen[bytes]:
        return start("rollout", "--run", "services", "--id", "w", *options)

    def log() -> str:
        return (tmp_path / "said").read_text()

    def steps() -> list[int]:
        file = tmp_path / "services" / "metrics.jsonl"
        records = read_metrics(file) if file.exists() else []
        return [r["step"] for r in records if r["kind"] == "step"]

    port = free_ports(1)[0]
    try:
        worker = work("--metrics", str(port))
        learner, _ = learn("steps=1000000")
        while len(steps()) < 3:
            assert learner.poll() is None, log()
            time.sleep(0.05)
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 143, log()
        done = len(steps())
        # The worker's numbers are of its last heartbeat, of which there may have been none yet.
        wait_until(lambda: groups_committed(scraped(port)) >= 3 * 4, lambda: scraped(port), worker)
        exported = scraped(port)
        learner, ports = learn(f"steps={done + 2}")
        assert (learner.wait(), worker.wait()) == (0, 0), log()
        assert log().count("run services is finished: this worker ends") == 1
        with redis.Redis.from_url(locked_redis, password=PASSWORD) as client:
            published = client.hget(Keys("services").info, "endpoints")
        assert work("--finished-wait", "0.1").wait() == 0, log()
        worker = work()
        learner, _ = learn(f"steps={done + 4}")
        assert (learner.wait(), worker.wait()) == (0, 0), log()
        assert "Traceback" not in log()
    finally:
        for process in started:
            process.kill()
            process.wait()
        said.close()
    records = read_metrics(tmp_path / "services" / "metrics.jsonl")
    assert steps() == list(range(1, done + 5))
    counted = [r["buffer/responses"] for r in records if r["kind"] == "step"]
    assert counted[-1] >= (done + 4) * 4 * 2, "of all three learners"
    assert_every_line_is_exported(METRICS, Exporter(METRICS, {"run": "services"}), records)
    assert all(PREFIX + m.exported in exported for m in WORKER_METRICS)
    assert (
        published
        == (
            f'{{"announce":"tcp://localhost:{ports[0]}","fetch":"tcp://localhost:{ports[1]}"}}'
        ).encode()
    )
