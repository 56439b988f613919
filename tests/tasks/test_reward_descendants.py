"""No process that a reward starts outlives its timeout, its own process, `close`, or the worker's kill -9."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import stretched

from areal_q.config import load
from areal_q.tasks import Completed, Problem, Score, build_reward

PROBLEM = Problem("2+2=", "4")
MARK = "REWARD_OF_THIS_TEST"
NEXT = 2
"""Those after it: a supervisor and its reward's process"""
STARTED = 6
"""The supervisor, the reward's process, and those that are surely there when it goes on: two that may be seen
or not are the shell's, and the one that is another at every moment"""
REWARD = """
import os, subprocess, sys
from pathlib import Path

SLEEP = ["sleep", "120"]
# The old process ends, the new one goes on.
HOP = "import os, time\\nfor _ in range(10_000): os.fork() and os._exit(0); time.sleep(0.001)"
STARTED = Path(__file__).with_name("started")

def reward(prompt, response, answer):
    if response == answer:
        return 1.0
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, process_group=0)
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP INT; sleep 120 & wait"])
    subprocess.Popen([sys.executable, "-c", HOP], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:   # a daemon: in a session of its own, and its parent ends
            STARTED.touch()
            os.execvp("sleep", SLEEP)
        os._exit(0)
    while not STARTED.exists():
        os.sched_yield()
    match response:
        case "hang":
            subprocess.run(SLEEP)
        case "exit":
            os._exit(3)
    return 0.5
"""
TOGETHER = REWARD.replace("def reward(", "async def reward(").replace(
    """    match response:
        case "hang":
            subprocess.run(SLEEP)""",
    """    match response:
        case "hang":
            await asyncio.create_subprocess_exec(*SLEEP)
            await asyncio.sleep(120)""",
)
TOGETHER = TOGETHER.replace(
    "    if response == answer:\n",
    """    if response == "slow":
        await asyncio.sleep(float(prompt))
    if response in (answer, "slow"):
""",
).replace("import os,", "import asyncio, os,")
WORKER = """
import asyncio, sys
from areal_q.config import load
from areal_q.tasks import Completed, Problem, build_reward

async def main():
    reward = build_reward(load(None, sys.argv[1:]))
    await reward.start()
    await reward(Problem("2+2=", "4"), [Completed("start")])
    print("started", flush=True)
    await reward(Problem("2+2=", "4"), [Completed("hang")])

asyncio.run(main())
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv(MARK, str(tmp_path))
    (tmp_path / "mine.py").write_text(REWARD)
    return [f'reward.path="{tmp_path / "mine.py"}"', "reward.processes=1"]


def alive(tmp_path: Path) -> list[str]:
    """Returns the commands of the processes that were started since MARK was set, and of their descendants."""
    mark, found = f"{MARK}={tmp_path}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:  # ended meanwhile, or of another user
            continue
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("response", "outcome"),
    [("hang", Score.failed("timeout")), ("exit", Score.failed("killed")), ("", Score(0.5, False))],
)
async def test_all_that_a_reward_started_ends_with_its_process(
    settings: list[str], tmp_path: Path, response: str, outcome: Score
):
    reward = build_reward(load(None, [*settings, f"reward.timeout_s={stretched(4.0)}"]))
    try:
        await reward.start()
        assert await reward(PROBLEM, [Completed(response)]) == [outcome]
        left = len(alive(tmp_path))
        assert left >= STARTED if outcome.valid else left == 0, alive(tmp_path)
        assert await reward(PROBLEM, [Completed("4")]) == [Score(1.0, True)]
    finally:
        await reward.close()
    assert alive(tmp_path) == []


@pytest.mark.timeout(60)
async def test_what_a_coroutine_started_ends_after_the_others_of_it(
    settings: list[str], tmp_path: Path
):
    """All of a process's coroutines are one process, which others may still wait for."""
    (tmp_path / "mine.py").write_text(TOGETHER)
    timeout_s = stretched(4.0)
    reward = build_reward(load(None, [*settings, f"reward.timeout_s={timeout_s}"]))
    try:
        await reward.start()
        hanging = asyncio.create_task(reward(PROBLEM, [Completed("hang")]))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5 * timeout_s)
        slow = asyncio.create_task(reward(Problem(f"{0.8 * timeout_s}", "4"), [Completed("slow")]))
        assert await hanging == [Score.failed("timeout")] and not slow.done()
        late = asyncio.create_task(reward(PROBLEM, [Completed("4")]))
        assert await slow == await late == [Score(1.0, True)]
        while len(alive(tmp_path)) > NEXT:
            await asyncio.sleep(0.01)
    finally:
        await reward.close()
    assert alive(tmp_path) == []


@pytest.mark.timeout(60)
def test_what_a_reward_started_ends_after_kill_9_of_its_worker(settings: list[str], tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, *settings], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "started\n"
        assert len(alive(tmp_path)) >= STARTED
        worker.kill()
    while alive(tmp_path):
        time.sleep(0.01)
