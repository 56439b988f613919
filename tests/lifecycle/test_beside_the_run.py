"""Trackers beside a run: whatever becomes of them, the run ends well, and says what became of them."""

import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from helpers.commands import wait_until
from rich.console import Console

from areal_q.config import load
from areal_q.runner import launcher
from areal_q.runner.child_processes import ChildProcesses, Program
from areal_q.runner.live_view import PlainView
from areal_q.runner.programs import Plan, plan
from buffer.redis_store.local_server import RedisServer

LEARNER = """
import pathlib, sys, time
while not pathlib.Path("RUN/tracker").exists():
    time.sleep(0.02)
time.sleep(1)  # longer than the launcher takes to look
pathlib.Path("RUN/learnt").touch()
"""
BEGIN = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(pathlib.Path("RUN/learnt").exists()))
pathlib.Path("RUN/tracker").touch()
"""
FATES = {
    "ends when it is told to": (
        "while not told: time.sleep(0.02)\ntime.sleep(0.5)\npathlib.Path('RUN/took').write_text(str(told))",
        None,
    ),
    "ends by itself": ("sys.exit(0)", None),
    "fails": (
        "sys.exit('areal-q: error: wandb: CommError: no route')",
        "warning: tracker-wandb ended with exit code 1, and the run goes on: areal-q: error: wandb: "
        "CommError: no route",
    ),
    "is killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "warning: tracker-wandb was killed by SIGKILL, and the run goes on: see RUN/logs/tracker-wandb.log",
    ),
    "hangs": (
        "while True: time.sleep(1)",
        "warning: tracker-wandb has not ended, and is killed; to go on: areal-q track RUN --to wandb",
    ),
    "is stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "warning: tracker-wandb has not ended, and is killed; to go on: areal-q track RUN --to wandb",
    ),
}


@pytest.mark.parametrize("fate", FATES)
def test_a_run_ends_well_whatever_its_tracker_does(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    monkeypatch.setattr(launcher, "TRACKERS_STOP_S", 60.0 if "told" in fate else 0.5)
    code, said = FATES[fate]
    run, out = load(None, [f"root={tmp_path}", "name=demo"]), StringIO()

    def program(name: str, code: str, beside: bool = False) -> Program:
        argv = [sys.executable, "-c", code.replace("RUN", str(tmp_path / "demo"))]
        return Program(name, argv, beside=beside)

    with RedisServer.start(tmp_path / "redis", short_dir / "redis") as server:
        tracker = program("tracker-wandb", BEGIN + code, beside=True)
        planned = Plan(None, server.url, program("learner", LEARNER), [], [tracker])
        view = PlainView(run, Console(file=out, width=300))
        assert launcher.launch(run, False, lambda _: view, lambda *given: planned) == 0
    assert (tmp_path / "demo" / "learnt").exists()
    lines = [line for line in out.getvalue().splitlines() if "tracker-wandb" in line]
    assert lines == ([] if said is None else [said.replace("RUN/logs", f"{tmp_path}/demo/logs")])
    if "told" in fate:
        assert (tmp_path / "demo" / "took").read_text() == "[True]"


def test_each_tracker_of_the_settings_is_a_process(tmp_path: Path) -> None:
    run = load(None, ['trackers=[{type="wandb"}, {type="trackio"}, {type="wandb", project="b"}]'])
    planned = plan(run, tmp_path / "demo", tmp_path, False)
    assert [one.name for one in planned.trackers] == [
        f"tracker-{n}" for n in ("wandb", "trackio", "wandb-2")
    ]
    for one in planned.trackers:
        assert one.argv[-6:-1] == ["areal_q", "track", str(tmp_path / "demo"), "--to", one.name[8:]]
        assert one.beside


def test_ctrl_c_leaves_a_wait_for_trackers(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Ctrl-C of a run that is done: it is no kill, and the last screen still comes."""
    run = load(None, [f"root={tmp_path}", "name=demo"])
    finished: list[str] = []

    class View:
        def start(self, run_dir: Path) -> None: ...
        def refresh(self) -> None: ...
        def stop(self) -> None: ...
        def finish(self) -> None:
            finished.append("finish")

        def note(self, text: str) -> None:
            finished.append(text)
            if text.startswith("waits for trackers"):
                interrupts[-1].count += 1

    monkeypatch.setattr(launcher, "TRACKERS_STOP_S", 1e9)
    interrupts: list[launcher.Interrupts] = []
    original = launcher.Interrupts.__enter__
    monkeypatch.setattr(
        launcher.Interrupts, "__enter__", lambda self: interrupts.append(self) or original(self)
    )
    hang = [
        sys.executable,
        "-c",
        "import pathlib, signal, time; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path / 'deaf')!r}).touch(); time.sleep(600)",
    ]
    until_deaf = f"while not pathlib.Path({str(tmp_path / 'deaf')!r}).exists(): time.sleep(0.02)"
    learner = Program("learner", [sys.executable, "-c", f"import pathlib, time\n{until_deaf}"])
    with RedisServer.start(tmp_path / "redis", short_dir / "redis") as server:
        planned = Plan(None, server.url, learner, [], [Program("tracker-x", hang, beside=True)])
        assert launcher.launch(run, False, lambda _: View(), lambda *given: planned) == 0
    assert finished[-1] == "finish" and "tracker-x has not ended" in finished[-2]


def test_a_number_that_another_session_has_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a run killed what had got the number of a tracker that ended long before."""
    children = ChildProcesses(tmp_path, tmp_path)
    children.start(Program("tracker-x", ["true"], beside=True))
    wait_until(lambda: not children.alive(["tracker-x"]), lambda: "it goes on")
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
        monkeypatch.setattr(children._children["tracker-x"], "pid", other.pid)
        children.kill()
        other.terminate()
    assert other.returncode == -signal.SIGTERM
