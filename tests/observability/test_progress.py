"""What a learner that is a service says in its log of how the run goes."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from areal_q.config import load
from areal_q.observability.metrics_log import MetricsLog
from areal_q.observability.progress import History, ProgressLog
from areal_q.observability.run_summary import best_of, summarize
from areal_q.runner.picture import picture
from learner.heldout_eval import BestVersion


def said(run_dir: Path, every_s: float) -> list[str]:
    """The lines of a run of three steps and an evaluation."""
    lines: list[str] = []
    run = load("quickstart", ["steps=3"])
    with MetricsLog(run_dir, tensorboard=False) as metrics:
        metrics.also("log", ProgressLog(run, run_dir, lines.append, every_s).add)
        for step in range(1, 4):
            metrics.write("step", step, {"reward/mean": 0.1 * step, "lag/max": 1.0})
        metrics.write("eval", 3, {"eval/accuracy": 0.75, "eval/problems": 8.0})
        metrics.write("end", 3, {}, reason="done")
    return lines


def test_log_has_one_line_a_while_and_each_evaluation(tmp_path):
    lines = [line.split("  ")[1:3] for line in said(tmp_path, every_s=3600.0) if " s  step" in line]
    assert lines == [["step 1/3", "reward 0.100"], ["step 3/3", "held-out accuracy 0.750"]]


def test_log_has_every_step_where_no_time_is_between_lines(tmp_path):
    lines = [line for line in said(tmp_path, every_s=0.0) if " s  step" in line]
    assert [line.split("  ")[1] for line in lines] == [f"step {n}/3" for n in (1, 2, 3, 3)]


def test_log_ends_with_what_the_run_came_to(tmp_path):
    title, *rows = said(tmp_path, every_s=3600.0)[2:]
    assert title.startswith("quickstart: done after 3 steps in ")
    told = {row[2:19].strip(): row[21:] for row in rows}
    assert told["held-out accuracy"].startswith("0.750   (at ")
    assert told["model"] == str(tmp_path / "hf")


def test_sets_are_told_beside_the_held_out_problems(tmp_path):
    lines: list[str] = []
    with MetricsLog(tmp_path, tensorboard=False) as metrics:
        metrics.also("log", ProgressLog(load("quickstart"), tmp_path, lines.append, 3600.0).add)
        hard = {"eval/hard/problems": 8.0, "eval/hard/pass_at_2": 0.5, "eval/hard/pass_at_4": 0.625}
        metrics.write("eval", 0, {"eval/accuracy": 0.25, "eval/problems": 4.0})
        metrics.write("eval", 5, {"eval/hard/accuracy": 0.125, **hard})
        both = {"eval/accuracy": 0.75, "eval/problems": 4.0, "eval/hard/accuracy": 0.375}
        metrics.write("eval", 9, both | hard)
        metrics.write("end", 9, {}, reason="done")

    told = [line.split("  ", 2)[2] for line in lines if "/420  " in line]
    assert told == [
        "held-out accuracy 0.250",
        "hard 0.125",
        "held-out accuracy 0.750  hard 0.375",
    ]
    rows = {line[2:19].strip(): line[21:] for line in lines}
    assert rows["held-out accuracy"].startswith("0.250 → 0.750")
    assert rows["best"] == "0.750 at step 9"
    assert rows["hard"] == "0.125 → 0.375   (pass@4 0.625, 8 problems)"


@pytest.mark.parametrize(
    ("settings", "late_by", "best"),
    [
        (["learner.max_lag=2", "eval.every=50"], [0.0, 2.0, 2.1, 49.0], 50),
        (["learner.max_lag=0", "eval.every=50"], [0.0, 1.0, 1.1, 51.0], 50),
        (["learner.max_lag=4", "eval.every=1"], [0.0, 0.9, 1.0, 3.0], 50),
        (["learner.max_lag=2", "eval.every=50"], [3.0, 3.0, 3.0, 3.0], None),
    ],
)
def test_no_view_calls_a_late_evaluation_the_best(settings, late_by, best):
    """The values rise, so that the last one in time is the best, as for the learner's checkpoints."""
    run = load("quickstart", ["eval.best=eval/accuracy", *settings])
    history, version = History(run), BestVersion(run)
    for number, late in enumerate(late_by):
        values = {"eval/accuracy": 0.1 * (number + 1), "eval/problems": 8.0, "eval/late_by": late}
        history.add({"kind": "eval", "step": 50 * number, "elapsed_s": 1.0} | values)
        version.add(50 * number, values)

    assert version.step == (-1 if best is None else best)
    assert (best_of(history.evals, "eval/accuracy", run) or {}).get("step") == best
    told = dict(summarize(history.evals, run).rows).get("best")
    assert told == (None if best is None else f"0.200 at step {best}")
    console = Console(width=120, record=True, file=StringIO())
    console.print(picture("demo", history, 1.0))
    assert ("0.400, best 0.200 at 50" in console.export_text()) == (best is not None)


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.1] * 19, ""),
        ([0.1] * 20, "0.100 → 0.100, level"),
        ([0.1] * 10 + [0.5] * 20, "0.100 → 0.500, level"),
        ([i / 100 for i in range(40)], "0.045 → 0.345, rising by 0.100 in 10 steps"),
        ([1 - i / 100 for i in range(20)], "0.955 → 0.855, falling by 0.100 in 10 steps"),
        ([0.5, 0.7] * 9 + [0.5, 0.8], "0.600 → 0.610, level"),
        ([0.1, None] * 20, ""),
    ],
)
def test_the_course_of_the_reward_is_told_in_words(rewards, told):
    history = History(load(None, ["steps=40"]))
    for step, reward in enumerate(rewards, start=1):
        record = {"kind": "step", "step": step, "elapsed_s": 1.0, "reward/mean": reward}
        history.add(record)
    assert history.course == told
    console = Console(width=120, record=True, file=StringIO())
    console.print(picture("demo", history, 1.0))
    assert (f"reward so far  {told}" in console.export_text()) == bool(told)


def test_log_warns_of_a_fault_once_and_knows_what_was_before(tmp_path):
    """The accuracy falls in a second learner's part, from what the first one's reached."""
    run = load("quickstart", ["steps=9"])
    lines: list[str] = []
    with MetricsLog(tmp_path, tensorboard=False) as metrics:
        metrics.write("eval", 0, {"eval/accuracy": 0.75, "eval/problems": 512.0})
    with MetricsLog(tmp_path, tensorboard=False) as metrics:
        log = ProgressLog(run, tmp_path, lines.append, every_s=3600.0)
        metrics.also("log", log.add)
        for step in range(1, 7):
            metrics.write("eval", step, {"eval/accuracy": 0.01, "eval/problems": 512.0})
            metrics.write("step", step, {"reward/mean": 0.0, "reward/std": 0.0})
    told = [line.split(";")[0] for line in lines if line.startswith("warning: ")]
    assert told == [
        "warning: held-out accuracy fell from 0.75 at step 0 to 0.01 at step 1",
        "warning: all rewards were 0 for 5 steps: nothing to learn from",
    ]
