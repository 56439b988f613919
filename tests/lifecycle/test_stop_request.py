"""A request to stop takes effect whenever its signal comes, and however many of them."""

import subprocess
import sys

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
