"""The clock of a run starts with the command that was typed, imports included, in all of its processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from areal_q.config import Run
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.runner.child_processes import ChildProcesses, Program
from areal_q.runner.live_view import PlainView
from areal_q.system.processes import BEGAN, command_began

SLOW_IMPORT = """
import time
first = time.monotonic()
time.sleep(0.2)
from areal_q.system.processes import command_began
print(command_began(), first)
"""


def test_a_command_begins_before_its_imports():
    before = time.monotonic()
    command = [sys.executable, "-c", SLOW_IMPORT]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    began, first = map(float, said.split())
    assert before - 0.02 <= began <= first  # the kernel counts in hundredths


def test_children_are_told_when_the_launcher_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(BEGAN, "12.5")
    (tmp_path / "logs").mkdir()
    children = ChildProcesses(tmp_path / "logs", tmp_path)
    code = "from areal_q.system.processes import command_began; print(command_began())"
    children.start(Program("child", [sys.executable, "-c", code]))
    while children.exit_code("child") is None:
        time.sleep(0.02)
    assert (tmp_path / "logs" / "child.log").read_text() == "12.5\n"


def test_the_view_and_the_metrics_have_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setenv(BEGAN, "80.0")
    view = PlainView(Run(name="demo", root=str(tmp_path)), Console(quiet=True))
    view.start(tmp_path / "demo")
    clock[0] = 110.0
    assert view.elapsed_s() == 30.0
    with MetricsLog(tmp_path / "demo", tensorboard=False, began=command_began()) as log:
        log.write("start", 0, {}, doing="loading the model")
    assert read_metrics(tmp_path / "demo" / "metrics.jsonl")[0]["elapsed_s"] == 30.0
    view.pull()
    assert view.elapsed_s() == 30.0
