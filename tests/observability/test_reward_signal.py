"""Failing and flat rewards are said: while the run goes on and in its summary."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_q.cli.final_screen import last_screen
from areal_q.cli.live_view import LiveView, PlainView
from areal_q.config import Run, load
from areal_q.observability.metrics_log import MetricsLog
from areal_q.observability.progress import FaultWatch, ProgressLog
from areal_q.observability.reward_signal import failed_rewards
from areal_q.observability.run_summary import summarize
from bench.records import make_beat

RAISED = "raised ZeroDivisionError: division by zero"
BEATS = [{"worker": "w0", "failure": RAISED}, {"worker": "w1", "failure": ""}]


@pytest.fixture
def own(tmp_path):
    """Settings of a run whose reward, in a file of the user's own, raises."""
    return load(None, [f'root="{tmp_path}"', f'reward.path="{tmp_path / "mine.py"}"', "name=demo"])


@pytest.fixture
def run_dir(own):
    directory = Path(own.root, own.name)
    directory.mkdir()
    return directory


def write_steps(run_dir, *rewards, workers=(), **metrics):
    """One step for each pair (mean, std)."""
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step, (mean, std) in enumerate(rewards, start=1):
            values = {"reward/mean": mean, "reward/std": std, **metrics}
            log.write("step", step, values, workers=workers)


def lines_of(console):
    return [line for line in console.export_text().splitlines() if line.startswith("warning")]


def test_first_failure_of_a_reward_is_said_with_cause_and_file(own, run_dir):
    console = Console(record=True, width=200, file=io.StringIO())
    view = PlainView(own, console)
    view.start(run_dir)
    view.refresh()
    write_steps(run_dir, (0.5, 0.1), workers=BEATS, **{"reward/errors": 1.0})
    view.refresh()
    (line,) = lines_of(console)
    assert f"failed once: {RAISED} (w0)" in line and str(own.reward.path) in line


def test_the_learner_s_own_log_reads_heartbeats_too(own, run_dir):
    """A sink of the log gets the structs that the learner wrote, not what a reader of the file gets."""
    beat = make_beat("w0", failure=RAISED)
    said: list[str] = []
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.also("log", ProgressLog(own, run_dir, said.append).add)
        log.write("step", 1, {"reward/errors": 1.0}, workers=[beat])
    assert any(f"failed once: {RAISED} (w0)" in line for line in said)


def test_failures_are_said_again_at_ten_times_as_many(own):
    watch = FaultWatch(own)
    step = {"kind": "step", "step": 1, "reward/mean": 0.5, "reward/std": 0.1}
    watch.add(step | {"reward/errors": 1.0, "workers": BEATS})
    assert len(watch.due()) == 1
    watch.add(step | {"reward/invalid": 4.0, "workers": []})
    assert watch.due() == [] and f"5 times: {RAISED}" in watch.warnings()[0]
    watch.add(step | {"reward/errors": 20.0})
    assert "25 times" in watch.due()[0]


def test_the_live_view_shows_failures_and_flat_rewards(own, run_dir):
    console = Console(record=True, width=110, force_terminal=True, file=io.StringIO())
    view = LiveView(own, console)
    view.start(run_dir)
    write_steps(run_dir, *[(0.0, 0.0)] * 5, workers=BEATS, **{"reward/errors": 1.0})
    view.refresh()
    view.stop()
    text = " ".join(console.export_text().split())
    assert "ZeroDivisionError" in text
    assert "all rewards were 0 for 5 steps: nothing to learn from" in text
    assert "warmstart.steps=400" in text


def test_equal_rewards_are_said_once_and_then_counted(own):
    watch = FaultWatch(own)
    said = []
    for step in range(60):
        watch.add({"kind": "step", "step": step, "reward/mean": 0.0, "reward/std": 0.0})
        said += watch.due()
    assert [line.split(": ")[0] for line in said] == [
        "all rewards were 0 for 5 steps",
        "all rewards were 0 for 50 steps",
    ]
    watch.add({"kind": "step", "step": 60, "reward/mean": 0.1, "reward/std": 0.3})
    assert watch.warnings() == []
    watch.restart()
    assert set(watch.lasting().values()) == {0}


def test_the_summary_tells_share_and_causes_of_failures(own, run_dir):
    invalid = {
        "reward/invalid": 3.0,
        "reward/invalid/exception": 2.0,
        "reward/invalid/timeout": 1.0,
    }
    write_steps(run_dir, (0.5, 0.5), (0.5, 0.5), workers=BEATS, **invalid)
    records = [{"kind": "step", **invalid}] * 2
    assert failed_rewards(records) == (6, {"exception": 4, "timeout": 2})
    console = Console(record=True, width=200, file=io.StringIO())
    last_screen(own, run_dir, console)
    text = console.export_text()
    assert "6 of 1,024 responses (0.6%), exception 4, timeout 2" in text
    assert "raised ZeroDivisionError" in text


def test_summary_of_flat_rewards_says_that_nothing_was_learnt(run_dir):
    def rows(*rewards):
        steps = [
            {"kind": "step", "step": i, "elapsed_s": 1.0, "reward/mean": m, "reward/std": s}
            for i, (m, s) in enumerate(rewards, start=1)
        ]
        return dict(summarize(steps, Run()).rows)

    flat = rows(*[(0.0, 0.0)] * 3)
    assert flat["reward is flat"] == "✗ all rewards were 0 for 3 steps: nothing to learn from"
    assert next(iter(flat)) == "reward is flat"
    assert "reward is flat" not in rows(*[(0.0, 0.0)] * 8, (0.2, 0.4))
    assert "reward is flat" not in rows(*[(0.1, 0.4)] * 8, (1.0, 0.0))
