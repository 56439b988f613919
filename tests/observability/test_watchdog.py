"""A service that is stuck is found, though its metrics answer, and ends itself; one that waits is not."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from areal_q.observability.health import complaint
from areal_q.observability.metric_table import METRICS
from areal_q.observability.prometheus_exporter import Exporter, serve_metrics
from areal_q.system.watchdog import STUCK, TIMES_LONGEST, Progress

HANGS = """
import sys, threading, time
from areal_q.system.watchdog import Progress, Watchdog
progress = Progress(0.5, 0.5)
Watchdog(progress).start()

def the_training_loop():
    for _ in range(3):
        progress.step()
    EVER

the_training_loop()
"""
LEARNER_HANGS = """
import sys, time
import learner.loop
from learner.__main__ import main
from areal_q.system.command import run_command
train_step, steps = learner.loop.train_step, []

def hangs_in_its_third_step(*args):
    steps.append(1)
    if len(steps) == 3:
        time.sleep(1e6)
    return train_step(*args)

learner.loop.train_step = hangs_in_its_third_step
run_command("learner", main, who="learner")
"""
SETTINGS = """
name = "stuck"
model = {type = "small", layers = 1, width = 16, heads = 2, kv_heads = 1, mlp = 16, max_positions = 32}
learner = {groups = 4, group_size = 2, max_lag = 1}
rollout = {engine = {type = "scripted"}, sampling = {max_tokens = 4}}
task = {type = "arithmetic", digits = 1, heldout = 4}
eval = {every = 1000, problems = 4}
"""


def test_the_limit_follows_the_pace_of_the_work(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(10.0, 100.0)
    now[0] = 1000.0
    assert progress.age_s == 0.0, "not before the first beat"
    progress.beat()
    now[0] += 50.0
    assert (progress.age_s, progress.limit_s) == (50.0, 100.0), "the first step may take long"
    progress.step()
    assert (progress.age_s, progress.limit_s) == (0.0, 10.0), "and says nothing of the others"
    now[0] += 7.0
    progress.step()
    assert progress.limit_s == 7.0 * TIMES_LONGEST
    now[0] += 1.0
    progress.forgive(1.0)
    assert progress.age_s == 0.0


def test_health_finds_a_learner_that_hangs_while_metrics_answer(monkeypatch, dead_proxy: None):
    exporter = Exporter(METRICS, {"run": "demo"})
    port = serve_metrics("0", exporter)
    exporter.progress = Progress(5.0, 5.0)
    exporter.progress.step()
    assert complaint(port, time.time()) is None
    monkeypatch.setattr(exporter.progress, "_last_s", time.monotonic() - 60.0)
    assert "stuck: no progress for 60 s, more than 5 s" in (complaint(port, time.time()) or "")


def test_health_finds_a_service_that_dies_as_it_answers():
    """The supervisor itself ended with a traceback."""

    def dies() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nareal")

    with socket.create_server(("127.0.0.1", 0)) as server:
        service = threading.Thread(target=dies)
        service.start()
        port = server.getsockname()[1]
        said = complaint(port, time.time())
        service.join()
    assert said == f"no metrics on port {port}: IncompleteRead(5 bytes read, 94 more expected)"


@pytest.mark.parametrize(
    ("ever", "code"),
    [("threading.Event().wait()", STUCK), ("sum(iter(int, 1))", 1)],
    ids=["waits", "holds the interpreter's lock"],
)
def test_a_stuck_process_ends_with_its_stacks(ever: str, code: int):
    script = HANGS.replace("EVER", ever)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == code
    assert "in the_training_loop" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_stuck_in_a_step_ends_one_that_waits_does_not(
    redis_url: str, tmp_path: Path, short_dir: Path
):
    """The learner first waits for its worker for longer than its watchdog allows a stuck one."""
    (tmp_path / "stuck.toml").write_text(SETTINGS)
    env = os.environ | {"REDIS_URL": redis_url, "OMP_NUM_THREADS": "1", "AREAL_Q_WATCHDOG": "3"}
    ends = [f"--{kind}=ipc://{short_dir}/{kind}" for kind in ("announce", "fetch")]
    argv = ["--config", str(tmp_path / "stuck.toml"), f"root={tmp_path}", *ends]
    log = tmp_path / "said"
    with log.open("wb") as said:
        stuck = subprocess.Popen(
            [sys.executable, "-c", LEARNER_HANGS, *argv], env=env, stdout=said, stderr=said
        )
        try:
            while "no step for 20 s" not in log.read_text():
                assert stuck.poll() is None, log.read_text()
                time.sleep(0.1)
            command = [sys.executable, "-m", "rollout", "--run", "stuck", "--id", "w"]
            patient = env | {"AREAL_Q_WATCHDOG": "0"}
            worker = subprocess.Popen(command, env=patient, stdout=said, stderr=said)
            code = stuck.wait()
            worker.kill()
            worker.wait()
        finally:
            stuck.kill()
            stuck.wait()
    told = log.read_text()
    assert code == STUCK, told
    assert told.count("stuck: no progress for") == 1 and "in hangs_in_its_third_step" in told
