"""What the user sees: the live picture, the plain lines, the last screen and the curves of a written run."""

import math
import random
import re
from io import StringIO

import pytest
from rich.console import Console

from areal_q.config import Run, load
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.observability.progress import History, plain_line
from areal_q.observability.run_summary import duration, summarize
from areal_q.runner import live_view
from areal_q.runner.final_screen import last_screen
from areal_q.runner.live_view import LiveView, PlainView, build_view
from areal_q.runner.picture import picture
from areal_q.system.disk import size


def write_run(run_dir, steps, monkeypatch, total=None):
    """The metrics of a run of `total` steps, `steps` of them done, at 0.8 s a step after 30 s."""
    draw = random.Random(0)
    clock = [1000.0]
    monkeypatch.setattr("areal_q.observability.metrics_log.time.monotonic", lambda: clock[0])
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step in range(0, 301, 100):
            clock[0] = 1000.0 + step / 10
            values = {"warmstart/loss": 2 - step / 200, "warmstart/step": step}
            log.write("warmstart", 0, values | {"warmstart/steps": 300})
        for step in range(steps + 1):
            clock[0] = 1030.0 + 0.8 * step
            skill = 0.96 - 0.65 * math.exp(-step / 60)
            if step:
                log.write("step", step, step_values(draw, skill), workers=[worker(step)])
            if step % 10 == 0:
                values = {"eval/accuracy": skill + draw.gauss(0, 0.01), "eval/problems": 512}
                log.write("eval", step, values, samples=samples(step))
        if total is None:
            log.write("end", steps, {}, reason="done")


def step_values(draw, skill):
    return {
        "reward/mean": skill + draw.gauss(0, 0.02),
        "reward/std": 0.41,
        "lag/mean": 1.0 + draw.gauss(0, 0.1),
        "lag/max": 2.0,
        "mismatch/kl_k3": 4e-4 * math.exp(draw.gauss(0, 0.2)),
        "policy/clip_fraction_up": 0.012 + 0.002 * draw.random(),
        "policy/clip_fraction_down": 0.008 + 0.002 * draw.random(),
        "policy/entropy": 0.31,
        "learner/tokens_per_s": 4000 + draw.gauss(0, 100),
        "learner/idle_share": 0.12,
        "rollout/tokens_per_s": 12345 + draw.gauss(0, 1),
        "rollout/idle_share": 0.03,
        "buffer/open_tickets": 128,
        "buffer/dropped_stale": 1,
        "weights/publish_s": 0.021,
        "weights/bytes": 312_000,
    }


def worker(step):
    return {
        "worker": "rollout-0", "version": step - 1, "active": 212, "tokens_per_s": 12345.0,
        "idle_share": 0.03, "groups": 64 * step, "swaps": step, "swap_s": 0.0042,
    }  # fmt: skip


def samples(step):
    right = {"prompt": "12+34=", "answer": "64", "response": "64", "correct": True}
    wrong = {"prompt": "99+01=", "answer": "001", "response": "09", "correct": False}
    learnt = {**wrong, "response": "001", "correct": True} if step else wrong
    return [right, learnt]


@pytest.fixture
def run(tmp_path):
    return Run(name="demo", root=str(tmp_path), steps=200)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "demo"


def recording(**options):
    return Console(record=True, width=110, file=open("/dev/null", "w"), **options)


@pytest.fixture
def console():
    console = recording()
    yield console
    console.file.close()


def history_of(directory, total):
    history = History(Run(steps=total))
    for record in read_metrics(directory / "metrics.jsonl"):
        history.add(record)
    return history


def test_the_picture_shows_progress_time_left_and_every_figure(directory, console, monkeypatch):
    write_run(directory, 50, monkeypatch, total=200)
    history = history_of(directory, 200)
    console.print(picture("demo", history, history.elapsed_s))
    text = console.export_text()
    for shown in (
        "demo", "training", "50/200", "1:10, 2:00 left", "best", " at 50", "2 at most", "± 0.410",
        "0.310 nats", "12,34", "idle 12.0%", "128 open, 1 dropped", "312 kB a version, 21 ms",
        "rollout-0", "49", "212", "3200", "4.2 ms",
    ):  # fmt: skip
        assert shown in text, shown


def test_time_left_follows_the_pace_of_the_last_steps(directory, monkeypatch):
    write_run(directory, 50, monkeypatch, total=200)
    assert history_of(directory, 200).eta_s == pytest.approx(150 * 0.8, rel=0.01)


def test_phases_follow_the_records():
    history = History(Run(steps=2))
    record = {"step": 0, "elapsed_s": 1.0}
    phases = [history.phase]
    for kind in (
        {"kind": "warmstart", "warmstart/step": 10, "warmstart/steps": 20},
        {"kind": "warmstart", "warmstart/step": 20, "warmstart/steps": 20},
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2},
        {"kind": "end", "step": 2, "reason": "done"},
    ):
        history.add(record | kind)
        phases.append(history.phase)
    assert phases == ["set-up", "warm start", "training", "training", "final evaluation", "done"]


def test_picture_is_drawn_before_records_and_with_gaps(console):
    history = History(Run(steps=5))
    console.print(picture("demo", history, 1.0))
    history.add({"kind": "step", "step": 1, "elapsed_s": 2.0, "reward/mean": None, "workers": []})
    console.print(picture("demo", history, 2.0))
    text = console.export_text()
    assert "set-up" in text and "1/5" in text and "–" in text


@pytest.mark.parametrize(
    ("variable", "view"), [("NO_COLOR", LiveView), ("CI", PlainView), ("TERM", PlainView)]
)
def test_a_view_is_plain_where_a_picture_is_noise(run, monkeypatch, variable, view):
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with open("/dev/null", "w") as null:
        assert isinstance(build_view(run, Console(file=null, force_terminal=True)), LiveView)
        assert isinstance(build_view(run, Console(file=null, force_terminal=False)), PlainView)
        monkeypatch.setenv(variable, "dumb")
        assert isinstance(build_view(run, Console(file=null, force_terminal=True)), view)


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_the_picture_fits_its_terminal_uncut(directory, monkeypatch, width):
    write_run(directory, 50, monkeypatch, total=200)
    history = history_of(directory, 200)
    wide, narrow = (Console(record=True, width=w, file=StringIO()) for w in (1000, width))
    wide.print(picture("demo", history, 61.0, awaits="", width=width))
    narrow.print(picture("demo", history, 61.0, awaits="", width=width))
    words, shown = (re.sub("[━╸╺]", " ", c.export_text()).split() for c in (wide, narrow))
    assert shown == words
    for label in ("reward", "held-out", "rollout", "learner", "weights"):
        assert label in shown
    assert "training" in shown and "50/200" in shown and "rollout-0" in shown


STARTED = {"step": 0, "elapsed_s": 1.0}
WARMED = STARTED | {"kind": "warmstart", "warmstart/step": 9, "warmstart/steps": 9}
EVALUATED = STARTED | {"kind": "eval", "eval/accuracy": 0.5}
AGENTS = "rollout.environment.type=external"
PLAYED = [
    "model={type='pretrained', path='x'}",
    "task={type='verifiers', env={taskset={id='x'}}}",
    "rollout.environment.type=verifiers",
]
OPEN = {"kind": "waiting", "rollout/open_episodes": 3.0, "rollout/episodes": 64.0}


@pytest.mark.parametrize(
    ("settings", "records", "says"),
    [
        ([], [], "starting: Redis, learner and workers, then evaluating 256 problems"),
        ([], [STARTED | {"kind": "start", "doing": "loading the model"}], "loading the model"),
        (["sft.path=x"], [], "starting: the learner, which reads model and examples"),
        (["eval.problems=512"], [WARMED], "evaluating 512 problems"),
        (
            [],
            [WARMED, STARTED | {"kind": "start", "doing": "evaluating: 40 of 256 problems"}],
            "evaluating: 40 of 256 problems",
        ),
        ([], [WARMED, EVALUATED], "first step"),
        (
            [AGENTS, "rollout.serve=8009", "learner.groups=8", "learner.group_size=8"],
            [WARMED, EVALUATED],
            "waiting for agents at http://127.0.0.1:8009; a step takes 64 episodes",
        ),
        (
            [AGENTS, "rollout.serve=8009"],
            [EVALUATED, STARTED | {"kind": "step", "step": 1}, STARTED | OPEN],
            "waiting for agents at http://127.0.0.1:8009, 3 of 64 episodes open",
        ),
        (PLAYED, [EVALUATED], "verifiers plays; a step takes 512 episodes"),
        (PLAYED, [EVALUATED, STARTED | OPEN], "verifiers plays, 3 of 64 episodes open"),
        (
            [AGENTS, "rollout.serve=8009"],
            [EVALUATED, STARTED | OPEN, STARTED | {"kind": "step", "step": 1}],
            "",
        ),
        ([], [WARMED, EVALUATED, STARTED | {"kind": "step", "step": 1}], ""),
        (
            ["steps=1"],
            [EVALUATED, STARTED | {"kind": "step", "step": 1}],
            "evaluating 256 problems",
        ),
        ([], [EVALUATED, STARTED | {"kind": "end", "reason": "done"}], ""),
    ],
)
def test_the_view_says_what_is_awaited(settings, records, says):
    run = load(None, settings)
    history = History(run)
    for record in records:
        history.add(record)
    assert live_view.awaited(run, history) == says


def test_a_warm_start_from_the_cache_says_where_it_is(console):
    record = WARMED | {"cache": "/home/me/.cache/areal-q/warmstart/1"}
    assert plain_line(record, History(Run(steps=9))).endswith(f"from the cache: {record['cache']}")
    history = History(Run(steps=9))
    history.add(record)
    console.print(picture("demo", history, 1.0))
    assert f"from the cache: {record['cache']}" in console.export_text()


def test_the_clock_goes_on_between_two_records(run, directory, monkeypatch):
    console = recording(force_terminal=True)
    clock = [100.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: clock[0])
    view = LiveView(run, console)
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("warmstart", 0, {"warmstart/step": 9, "warmstart/steps": 9})
    view.start(directory)
    view.pull()
    clock[0] += 30.0
    console.print(view._picture())
    view.stop()
    text = console.export_text()
    console.file.close()
    assert "30.0 s" in text and "evaluating 256 problems" in text


def test_a_plain_line_of_a_wait_has_the_run_s_own_clock(run, directory, console, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: clock[0])
    view = PlainView(run, console)
    view.start(directory)
    clock[0] += 30.0  # The learner's process starts long after the launcher's.
    with MetricsLog(directory, tensorboard=False) as log:
        clock[0] += 2.0
        log.write("warmstart", 0, {"warmstart/step": 9, "warmstart/steps": 9})
    view.refresh()
    assert console.export_text().splitlines()[-1] == "    2.0 s  evaluating 256 problems"


def test_plain_view_prints_evaluations_and_a_line_now_and_then(
    run, directory, console, monkeypatch
):
    view = PlainView(run, console)
    view.start(directory)
    clock = [0.0]
    with MetricsLog(directory, tensorboard=False) as log:
        monkeypatch.setattr(live_view.time, "monotonic", lambda: clock[0])
        for step in range(1, 21):
            clock[0] += 1.0
            log.write("step", step, {"reward/mean": step / 100})
            view.refresh()
        log.write("eval", 20, {"eval/accuracy": 0.625})
        view.refresh()
    lines = console.export_text().splitlines()
    steps = [line.split("step ")[1].split("/")[0] for line in lines if "reward" in line]
    assert steps == ["1", "6", "11", "16"]
    assert "step 20/200  held-out accuracy 0.625" in lines[-1]


def test_plain_view_counts_open_episodes_now_and_then(run, directory, console, monkeypatch):
    agents = load(None, [f"root={directory.parent}", "name=demo", AGENTS, "rollout.serve=8009"])
    view = PlainView(agents, console)
    view.start(directory)
    clock = [100.0]
    with MetricsLog(directory, tensorboard=False) as log:
        monkeypatch.setattr(live_view.time, "monotonic", lambda: clock[0])
        log.write("eval", 0, {"eval/accuracy": 0.5})
        view.refresh()
        clock[0] += 10.0
        for played in range(11):
            clock[0] += 1.0
            log.write("waiting", 0, {"rollout/open_episodes": played, "rollout/episodes": 64})
            view.refresh()
    lines = [line for line in console.export_text().splitlines() if "episodes open" in line]
    assert [line.split(", ")[1].split()[0] for line in lines] == ["0", "5", "10"]


def test_plain_view_of_a_resumed_run_shows_only_what_is_new(run, directory, console, monkeypatch):
    with MetricsLog(directory, tensorboard=False) as log:
        monkeypatch.setattr("areal_q.observability.metrics_log.time.time", lambda: 1000.0)
        log.write("eval", 10, {"eval/accuracy": 0.125})
        monkeypatch.undo()
        view = PlainView(run, console)
        view.start(directory)
        view.refresh()
        log.rewind(10)
        log.write("eval", 20, {"eval/accuracy": 0.25})
        log.write("end", 20, {}, reason="drained")
        view.stop()
    text = console.export_text()
    assert "0.125" not in text and "0.250" in text and "drained at step 20" in text
    assert [e["eval/accuracy"] for e in view.history.evals] == [0.125, 0.25]


def test_plain_line_of_a_step_without_some_values_shows_dashes():
    line = plain_line(
        {"kind": "step", "step": 3, "elapsed_s": 1.0, "mismatch/kl_k3": None}, History(Run(steps=9))
    )
    assert "step 3/9" in line and "KL (k3) –" in line


def test_the_kl_that_is_shown_cannot_cancel_by_chance():
    """k1 is the mean of terms of either sign: here it is 0 though no token agrees."""
    log_w = [0.5, -0.5]
    k3 = sum(math.exp(x) - 1 - x for x in log_w) / 2
    record = {"kind": "step", "step": 3, "elapsed_s": 1.0, "mismatch/kl": 0.0, "mismatch/kl_k3": k3}
    assert "KL (k3) 1.3e-01" in plain_line(record, History(Run(steps=9)))
    assert dict(summarize([record], Run()).rows)["mismatch KL"] == "1.28e-01 nats per token (k3)"


def test_live_view_draws_records_and_starts_over_after_a_rewind(run, directory):
    console = recording(force_terminal=True)
    view = LiveView(run, console)
    view.start(directory)
    with MetricsLog(directory, tensorboard=False) as log:
        for step in range(1, 8):
            log.write("step", step, {"reward/mean": 0.5})
        view.pull()
        assert view.history.step == 7
        log.rewind(4)
        log.write("step", 5, {})
        view.stop()
    assert view.history.step == 5
    assert "5/200" in console.export_text()
    console.file.close()


def test_last_screen_tells_result_answers_paths_and_commands(run, directory, console, monkeypatch):
    write_run(directory, 200, monkeypatch)
    (directory / "hf").mkdir()
    (directory / "checkpoints" / "step-200").mkdir(parents=True)
    last_screen(run, directory, console)
    text = console.export_text()
    records = read_metrics(directory / "metrics.jsonl")
    evals = [r["eval/accuracy"] for r in records if r["kind"] == "eval"]
    flat = "".join(text.split())
    for shown in (
        "demo: done after 200 steps in 3:10",
        f"{evals[0]:.3f} → {evals[-1]:.3f}",
        "512 problems",
        "2 at most",
        "nats per token",
        "12,345 tokens/s, idle 3.0%",
        "✗ 09",
        "✓ 001",
        f"areal-q eval {directory}",
        f"areal-q run {directory} --resume steps=400",
        f"tensorboard --logdir {directory}/tensorboard",
        f"{directory}/metrics.jsonl",
        "least significant digit first",
    ):
        assert "".join(shown.split()) in flat, shown
    assert len(text.splitlines()) <= 40


def write_gaps(directory, *gaps):
    """A step for each pair of gaps: of a faithful engine, and of one that is not."""
    with MetricsLog(directory, tensorboard=False) as log:
        for step, (good, bad) in enumerate(gaps, start=1):
            values = {"fidelity/engine_torch/gap_mean_nats": good}
            values |= {f"fidelity/engine_{x}/bound_nats": 0.03 for x in ("torch", "vllm")}
            values |= {"fidelity/engine_vllm/gap_mean_nats": bad}
            values |= {"fidelity/engine_vllm/version": step - 1}
            log.write("step", step, values)


WORST = "engine vllm: log-probs 0.25 nats off its weights at version 1 (bound 0.03)"


def test_a_run_that_gave_up_is_told_how_to_go_on(directory, console):
    run = load(None, ["name=demo", f'root="{directory.parent}"', "eval.best=eval/accuracy"])
    (directory / "checkpoints" / "step-000008").mkdir(parents=True)
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("step", 8, {"reward/mean": 0.5})
        log.write("end", 8, {}, reason="done")
    last_screen(run, directory, console)
    text = " ".join(console.export_text().split())
    assert f"areal-q run {directory} --resume eval.patience=0" in text
    assert f"areal-q export {directory} DIR --best" in text


def test_sets_are_in_the_picture_of_a_run(directory, console):
    history = History(Run(steps=20))
    records = [
        {"eval/accuracy": 0.5, "eval/problems": 4.0, "eval/hard/accuracy": 0.125},
        {"eval/more/accuracy": 1.0},
    ]
    for step, values in enumerate(records):
        history.add({"kind": "eval", "step": step, "elapsed_s": 1.0} | values)
    console.print(picture("demo", history, 1.0))
    text = " ".join(console.export_text().split())
    assert "held-out 0.500, best 0.500 at 0" in text
    assert "hard 0.125" in text and "more 1.000" in text


def test_last_screen_tells_the_worst_gap_of_an_unfaithful_engine(run, directory, console):
    write_gaps(directory, (0.001, 0.02), (0.001, 0.25), (0.001, 0.1))
    last_screen(run, directory, console)
    text = " ".join(console.export_text().split())
    assert WORST in text and "engine torch" not in text


def test_a_run_of_faithful_engines_has_no_line_about_it(run, directory, console):
    write_gaps(directory, (0.001, 0.02), (float("nan"), 0.03))
    last_screen(run, directory, console)
    console.print(picture("demo", history_of(directory, 3), 1.0))
    assert "log-probs" not in console.export_text()


def test_the_last_screen_says_how_much_of_a_gap_is_noise(run, directory, console):
    values = {"gap_mean_nats": 0.28, "noise_mean_nats": 0.27, "bound_nats": 0.4, "version": 3}
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("step", 1, {f"fidelity/engine_torch/{k}": v for k, v in values.items()})
        values |= {"gap_mean_nats": 0.9}
        log.write("step", 1, {f"fidelity/engine_vllm/{k}": v for k, v in values.items()})
    last_screen(run, directory, console)
    text = " ".join(console.export_text().split())
    off = "log-probs 0.28 nats off its weights at version 3"
    assert f"fidelity engine torch: {off}, 0.27 of it noise that no alignment removes" in text
    assert "✗ engine vllm: log-probs 0.9 nats off" in text
    assert "only 0.27 of it noise that no alignment removes (bound 0.4)" in text


def test_live_view_and_watch_show_gap_bound_and_version(run, directory):
    console = recording(force_terminal=True)
    write_gaps(directory, (0.001, 0.02), (0.001, 0.25))
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("end", 2, {}, reason="done")
    live_view.watch(run, directory, console)
    assert WORST in console.export_text()
    console.file.close()


def test_the_plain_view_warns_of_an_engine_once(run, directory, console, monkeypatch):
    view = PlainView(run, console)
    view.start(directory)
    for gap in (0.02, 0.25, 0.3):
        write_gaps(directory, (0.001, 0.02), (0.001, gap))
        view.refresh()
    lines = [line for line in console.export_text().splitlines() if line.startswith("warning")]
    assert lines == [f"warning: {WORST}"]


def test_the_last_screen_offers_no_command_that_cannot_work(run, directory, console):
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("warmstart", 0, {"warmstart/step": 1, "warmstart/steps": 9})
    last_screen(run, directory, console)
    text = console.export_text()
    assert "tensorboard --logdir" in text and "--resume" not in text and "areal-q eval" not in text


def test_run_without_a_record_has_a_last_screen_too(run, directory, console):
    last_screen(run, directory, console)
    assert "stopped before its first record" in console.export_text()


def test_a_summary_survives_a_run_of_nothing_but_a_warm_start(directory):
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("warmstart", 0, {"warmstart/step": 1, "warmstart/steps": 9})
        log.write("end", 0, {}, reason="drained")
    summary = summarize(read_metrics(directory / "metrics.jsonl"), Run())
    assert summary.title.startswith("drained after 0 steps")
    assert (summary.rows, summary.answers) == ([], [])


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.24, "9.2 s"), (59.99, "60.0 s"), (192, "3:12"), (4000, "1:06:40")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "999 B"), (1_500_000, "1.5 MB"), (2.5e10, "25 GB")]
)
def test_sizes_have_a_unit(nbytes, text):
    assert size(nbytes) == text


def test_a_summary_shows_dashes_for_what_no_step_reported(directory):
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("step", 1, {"reward/mean": 0.5, "mismatch/kl_k3": float("nan")})
    rows = dict(summarize(read_metrics(directory / "metrics.jsonl"), Run()).rows)
    assert "staleness" not in rows
    assert rows["mismatch KL"] == "– nats per token (k3)"
    assert "nan" not in str(rows)


def test_one_evaluation_is_no_change_between_two(directory):
    sample = {"prompt": "1+1=", "answer": "2", "response": "2", "correct": True}
    values = {
        "eval/accuracy": 0.5,
        "eval/problems": 20,
        "eval/hard/accuracy": 0.25,
        "eval/hard/problems": 4,
    }
    with MetricsLog(directory, tensorboard=False) as log:
        log.write("eval", 0, values, samples=[sample])
        summary = summarize(read_metrics(directory / "metrics.jsonl"), Run())
        assert dict(summary.rows)["held-out accuracy"].startswith("0.500   (at ")
        assert dict(summary.rows)["hard"].startswith("0.250   (")
        assert summary.answers == []
        log.write("eval", 9, values, samples=[sample])
        summary = summarize(read_metrics(directory / "metrics.jsonl"), Run())
    assert dict(summary.rows)["held-out accuracy"].startswith("0.500 → 0.500   (from ")
    assert len(summary.answers) == 1
