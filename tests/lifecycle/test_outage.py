"""How clients take a Redis that does not answer: few lines in the log, and no wait once they are told to go."""

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from helpers.commands import limit

from areal_q.errors import BufferGone
from areal_q.messages import Ticket
from buffer.redis_store import LearnerBuffer, WorkerBuffer, connection
from buffer.redis_store.local_server import find_binary

NOBODY = "unix:///nowhere/redis"


def serve(directory: Path, *settings: str) -> tuple[subprocess.Popen[bytes], str]:
    argv = [
        find_binary(),
        "--port",
        "0",
        "--unixsocket",
        "s",
        "--dir",
        str(directory),
        "--save",
        "",
        *settings,
    ]
    server = subprocess.Popen(argv, cwd=directory, stdout=subprocess.DEVNULL)
    with socket.socket(socket.AF_UNIX) as peer:
        while peer.connect_ex(str(directory / "s")):  # there before it listens
            assert server.poll() is None and time.monotonic() < limit.at_s
            time.sleep(0.01)
    return server, f"unix://{directory / 's'}"


@pytest.mark.timeout(60)
async def test_a_redis_that_loads_is_said_once(short_dir: Path, caplog: pytest.LogCaptureFixture):
    """A restart of Redis once gave 181 lines in 0.4 s: one for each group that two workers had in flight."""
    caplog.set_level("INFO")
    first, url = serve(short_dir)
    with redis.Redis.from_url(url) as client:
        client.config_set("rdbcompression", "no")
        client.mset({str(n): "x" * 3000 for n in range(3000)})
        client.save()
    first.kill()
    first.wait()
    (short_dir / "s").unlink()
    second, url = serve(short_dir, "--key-load-delay", "1000")
    try:
        worker = WorkerBuffer(url, "run", "w")
        await asyncio.gather(*(worker.claim(1, block_s=0.0) for _ in range(60)))
        await worker.close()
    finally:
        second.kill()
        second.wait()
    said = [record.getMessage() for record in caplog.records]
    assert sum("trying again" in line for line in said) == 1, said
    assert sum("answers again" in line for line in said) == 1, said
    assert len(said) < 6, said


def test_an_outage_is_told_with_its_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    again = connection.SAY_AGAIN_S
    clock = iter([100.0, 101.0, 100.0 + again, 102.5 + again])
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=clock.__next__))
    outage = connection.Outage()
    for _ in range(3):
        outage.goes_on("here", OSError("gone"))
    outage.answered(after_failure=True)
    assert [record.getMessage() for record in caplog.records] == [
        "redis at here: gone; trying again",
        f"redis at here: for {again:.0f} s now: gone",
        f"redis answers again, after {again + 2.5:.1f} s",
    ]


@pytest.mark.timeout(60)
def test_a_learner_told_to_go_does_not_wait_for_redis():
    stop = threading.Event()
    learner = LearnerBuffer(NOBODY, "run", patience_s=1e6, stop=stop)
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    for _ in range(3):
        with pytest.raises(BufferGone):
            learner.cursor()
    timer.join()
    learner.close()


@pytest.mark.timeout(60)
async def test_a_worker_told_to_go_does_not_wait_for_redis(
    make_ticket: Callable[..., Ticket], caplog: pytest.LogCaptureFixture
):
    from buffer.interface import Claim

    worker = WorkerBuffer(NOBODY, "run", "w", patience_s=1e6)
    await worker.leave([Claim("tickets", "1-1", make_ticket(1))])
    await worker.close()
    assert "1 tickets were not handed back" in caplog.text


def test_each_pause_is_twice_as_long_up_to_a_second(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection.random, "uniform", lambda low, high: high)
    patience = connection.Patience("redis://", 60.0)
    found = [patience.pause(redis.ConnectionError("gone")) for _ in range(6)]
    assert found == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
