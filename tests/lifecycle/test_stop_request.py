"""A request to stop takes effect whenever its signal comes, and however many of them."""

import _thread
import signal
import subprocess
import sys

import pytest

from areal_q.system.stop_request import StopRequest

SHOOTS = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGTERM)
    time.sleep(1e-5)
"""
WAITS = f"""
import os, subprocess, sys
from areal_q.system.stop_request import StopRequest

StopRequest().listen()
shooter = subprocess.Popen([sys.executable, "-c", {SHOOTS!r}, str(os.getpid())], stderr=subprocess.DEVNULL)
try:
    for _ in range(2000):
        stop = StopRequest()
        stop.listen()
        while not stop.wait(1e-4):
            pass
        assert stop.is_set() and stop.exit_code == 143
finally:
    shooter.kill()
"""


def test_signals_on_the_heels_of_another_stop_a_process():
    """The handler of the second waited for ever for the lock that the first, or `wait`, held."""
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_process_that_may_start_no_more_threads_stops(monkeypatch: pytest.MonkeyPatch):
    """It learnt of the request, and its waits never did."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    stop = StopRequest()
    stop.receive(signal.SIGTERM)
    assert stop.wait(0.0) and stop.is_set()
