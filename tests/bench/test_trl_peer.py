"""The bench beside TRL, with a program in TRL's place that fails, hangs or aborts at its end."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import stretched

from bench import trl_peer
from bench.common import ROOT, cpu_seconds
from bench.trl_peer import Layout, PeerFailed, best_layout, train

PROGRAM = """#!{python}
import json, os, subprocess, sys, time
spec = json.load(open(sys.argv[-1]))
if spec["bf16"]:
    sys.exit("no such layout here")
if spec["time_limit_s"] < 0:
    # As torchrun starts the processes that train.
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with open(spec["out"] + ".pid", "w") as out:
        out.write(str(child.pid))
    time.sleep(60)
with open(spec["out"], "w") as out:
    print(json.dumps(dict(kind="start", step=0, versions=dict(trl="1"))), file=out)
    for step in (1, 2, 3):
        seconds = step / spec["microbatches"]
        record = dict(kind="step", step=step, elapsed_s=seconds, generate_s=0.1, cpu_s=step * spec["threads"])
        print(json.dumps(record | dict(tokens=7)), file=out)
    if spec["time_limit_s"] < 1:
        out.flush()
        time.sleep(60)
    print(json.dumps(dict(kind="end", step=0)), file=out)
os.abort()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


def spec(tmp_path: Path, limit_s: float = 10.0) -> dict[str, Any]:
    return {"out": str(tmp_path / "trl.jsonl"), "time_limit_s": limit_s}


def test_a_layout_that_aborts_after_its_end_counts(python: Path, tmp_path: Path):
    curve, versions = train(python, spec(tmp_path), Layout(1, 1, 1))
    assert (curve.ended, curve.tokens, versions) == ([1.0, 2.0, 3.0], 7, {"trl": "1"})


def test_a_layout_that_hangs_is_ended(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trl_peer, "START_S", 2.0 + stretched(3.0))
    with pytest.raises(PeerFailed, match=r"trl\.log"):
        train(python, spec(tmp_path, limit_s=-1.0), Layout(1, 1, 1))
    assert not Path("/proc", (tmp_path / "trl.jsonl.pid").read_text()).exists()


def test_what_a_late_layout_did_counts(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trl_peer, "START_S", stretched(3.0))
    curve, versions = train(python, spec(tmp_path, limit_s=0.5), Layout(1, 1, 1))
    assert (curve.ended, versions) == ([1.0, 2.0, 3.0], {"trl": "1"})


@pytest.mark.parametrize(("judge", "best"), [("wall", Layout(1, 2, 2)), ("cpu", Layout(1, 1, 1))])
def test_the_best_layout_is_one_that_does_not_fail(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge: Any, best: Layout
):
    layouts = [Layout(1, 2, 2, True), Layout(1, 2, 2), Layout(1, 1, 1)]
    monkeypatch.setattr(trl_peer, "LAYOUTS", layouts)
    chosen, tried = best_layout(python, spec(tmp_path), 10.0, judge)
    assert chosen == best
    assert tried.count("failed") == 2


def test_cpu_seconds_include_children_that_have_ended():
    spin = "import time\nwhile time.process_time() < 0.4: pass\n"
    before = cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-S", "-c", spin], check=True)
    # The system counts in hundredths, and rounds each part down.
    assert cpu_seconds(os.getpid()) - before > 0.3


def test_cpu_seconds_include_children_that_live():
    before = cpu_seconds(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert cpu_seconds(os.getpid()) - before > 0.25
        child.kill()


def test_worked_sums_reward_the_last_total():
    task = runpy.run_path(str(ROOT / "bench/tasks/worked_sums.py"))
    prompt, answer = task["problems"]()[0]
    total = sum(map(int, prompt.rstrip("=").split("+")))
    assert len(answer) == 103
    rewards = [task["reward"](prompt, text, answer) for text in (answer, f"={total}", "1+1=2")]
    assert rewards == [1, 1, 0]
