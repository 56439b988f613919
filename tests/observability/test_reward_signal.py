"""Failing and flat rewards are said: while the run goes on and in its summary."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_q.config import Run, load
from areal_q.observability.metrics_log import MetricsLog
from areal_q.observability.progress import FaultWatch, ProgressLog
from areal_q.observability.reward_signal import RewardFailures
from areal_q.observability.run_summary import summarize
from areal_q.runner.final_screen import last_screen
from areal_q.runner.live_view import LiveView, PlainView
from bench.records import make_beat

FAILED = {"buffer/reward_errors": 1.0, "buffer/responses": 512.0, "buffer/invalid/exception": 1.0}
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
    write_steps(run_dir, (0.5, 0.1), workers=BEATS, **FAILED)
    view.refresh()
    (line,) = lines_of(console)
    said = "the reward failed for 1 of 512 responses (0.2%), exception 1"
    assert f"{said}: {RAISED} (w0); mend the reward {own.reward.path}" in line


@pytest.mark.parametrize(
    "counts", [{}, FAILED | {"buffer/reward_errors": 0, "buffer/responses": 0}]
)
def test_a_reward_that_fails_is_said_before_any_step(own, run_dir, counts):
    """The groups of its first responses may take as long as their timeouts, or never be learnt from."""
    console = Console(record=True, width=200, file=io.StringIO())
    view = PlainView(own, console)
    view.start(run_dir)
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.write("failing", 0, counts, workers=BEATS)
    view.refresh()
    assert lines_of(console)[0].startswith(f"warning: the reward fails: {RAISED} (w0); mend the")


def test_an_agent_that_gave_up_once_is_no_failing_reward():
    """It may say so before it plays the same episode well."""
    failures = RewardFailures()
    failures.add(
        {"kind": "step", "buffer/reward_errors": 0.0, "buffer/responses": 8.0, "workers": BEATS}
    )
    assert not failures


def test_answers_without_a_score_count_once():
    """A mixture's sources are parts of the held-out set; a set with an interval of its own has own records."""
    failures = RewardFailures()
    failures.add({"kind": "eval", "eval/invalid": 354.0, "eval/sums/invalid": 354.0})
    failures.add({"kind": "eval", "eval/hard/invalid": 0.0})
    assert failures and str(failures) == "354 answers of an evaluation have no score"
    failures.add({"kind": "eval", "eval/invalid": 0.0, "eval/sums/invalid": 0.0})
    assert not failures


def test_answers_without_a_score_are_said_beside_the_accuracy(own, run_dir):
    console = Console(record=True, width=200, file=io.StringIO())
    with MetricsLog(run_dir, tensorboard=False) as log:
        values = {"eval/accuracy": 0.5, "eval/problems": 512.0, "eval/invalid": 354.0}
        values |= {"eval/hard/accuracy": 0.25, "eval/hard/problems": 8.0, "eval/hard/invalid": 1.0}
        log.write("eval", 0, values, samples=[])
    view = PlainView(own, console)
    view.start(run_dir)
    view._since_s = 0.0
    view.refresh()
    last_screen(own, run_dir, console)
    text = console.export_text()
    assert "step 0/200  held-out accuracy 0.500, 354 answers without a score" in text
    assert "512 problems, 354 answers without a score)" in text
    assert "(8 problems, 1 answer without a score)" in text
    assert "354 answers of an evaluation have no score" in text


def test_the_learner_s_own_log_reads_heartbeats_too(own, run_dir):
    """A sink of the log gets the structs that the learner wrote, not what a reader of the file gets."""
    beat = make_beat("w0", failure=RAISED)
    said: list[str] = []
    with MetricsLog(run_dir, tensorboard=False) as log:
        log.also("log", ProgressLog(own, run_dir, said.append).add)
        log.write("step", 1, FAILED, workers=[beat])
    assert any(f"responses (0.2%), exception 1: {RAISED} (w0)" in line for line in said)


def test_failures_are_said_again_after_ten_times_the_steps(own):
    watch, said = FaultWatch(own), []
    for step in range(1, 13):
        values = {"buffer/reward_errors": 5.0 * step, "buffer/responses": 512.0 * step}
        watch.add({"kind": "step", "step": step, "reward/mean": 0.5, "reward/std": 0.1} | values)
        said += [(step, line.partition(" (")[0]) for line in watch.due()]
    assert said == [
        (1, "the reward failed for 5 of 512 responses"),
        (10, "the reward failed for 50 of 5,120 responses"),
    ]


def test_the_live_view_shows_failures_and_flat_rewards(own, run_dir):
    console = Console(record=True, width=110, force_terminal=True, file=io.StringIO())
    view = LiveView(own, console)
    view.start(run_dir)
    write_steps(run_dir, *[(0.0, 0.0)] * 5, workers=BEATS, **FAILED)
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
    """Most of them are of groups that no step learnt from."""
    counts = {"buffer/reward_errors": 11_728.0, "buffer/responses": 17_872.0}
    causes = {"buffer/invalid/exception": 11_700.0, "buffer/invalid/timeout": 28.0}
    write_steps(run_dir, (0.5, 0.5), (0.5, 0.5), workers=BEATS, **counts, **causes)
    console = Console(record=True, width=200, file=io.StringIO())
    last_screen(own, run_dir, console)
    told = "the reward failed for 11,728 of 17,872 responses (65.6%), exception 11,700, timeout 28"
    rows = console.export_text().splitlines()[2:4]
    assert rows[0].split("✗ ")[1].rstrip() == f"{told}: {RAISED} (w0)"
    assert f"mend the reward {own.reward.path}" in rows[1]


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
