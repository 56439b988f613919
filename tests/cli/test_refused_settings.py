"""Mistakes in the settings are refused before a warm start, in one line that names the setting."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import refused, run_here
from helpers.fixture_types import MakeRun
from helpers.policies import initial_model

from areal_q.checks.hub import REAL_MODEL, not_there
from areal_q.checks.settings import check_directories, preflight, without_effect
from areal_q.config import PretrainedModel, Run, load, rules
from areal_q.errors import CheckpointError, ConfigError, TaskError
from areal_q.models import save_decoder
from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.tasks import CharTokenizer, build_task, build_tokenizer
from learner.build import build_learner
from learner.build_policy import build_policy
from learner.data.eval_sets import problems_of_sets
from rollout.__main__ import main as worker
from rollout.engines import build_engine

NO_STOP = threading.Event()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of loopback at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["rollout.serve=99999"], "rollout.serve: there is no port 99999"),
        (["rollout.serve=65535", "rollout.workers=2"], "rollout.serve: there is no port 65536"),
        (["model.width=36"], "model.width = 36 is not an even number for each of model.heads = 4"),
        (["model.kv_heads=3"], "model.heads = 4 is not a multiple of model.kv_heads = 3"),
    ],
)
def test_settings_that_can_never_work_are_refused_when_read(
    make_run: MakeRun, settings: list[str], complaint: str
):
    with pytest.raises(ConfigError, match=complaint):
        make_run(*settings)


def test_ports_at_the_end_of_their_range_and_any_port_are_ports(make_run: MakeRun):
    for address in ("65534", "0", "127.0.0.1:65534"):
        assert make_run("rollout.workers=2", f"rollout.serve={address}").rollout.serve is not None


def test_the_second_workers_port_counts_too(make_run: MakeRun, taken: int):
    run = make_run("rollout.workers=2", f"rollout.serve={taken - 1}")
    with pytest.raises(
        ConfigError, match=rf"rollout\.serve: 127\.0\.0\.1:{taken}: Address already"
    ):
        preflight(run)
    preflight(make_run("rollout.workers=1", f"rollout.serve={taken - 1}"))


@pytest.mark.parametrize("environment", [None, "0.0.0.0:8000"])
def test_outside_agents_need_an_endpoint_of_workers_started_here(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, environment: str | None
):
    external = "rollout.environment.type=external"
    preflight(make_run(external, "rollout.serve=0"))
    preflight(make_run(external, "rollout.workers=0"))
    if environment:
        monkeypatch.setenv("AREAL_Q_SERVE", environment)
        preflight(make_run(external))
    else:
        with pytest.raises(ConfigError, match=r"rollout\.serve: .*'external' needs an endpoint"):
            preflight(make_run(external))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ('model={type="pretrained",path="gone"}', r"model\.path: gone: no such directory"),
        ('learner.reference_kl={path="gone"}', r"learner\.reference_kl\.path: gone: no such"),
        ('broadcast.keys="gone"', r"broadcast\.keys: gone: no such directory"),
    ],
)
def test_a_directory_that_is_not_there_is_named_with_its_setting(settings: str, complaint: str):
    with pytest.raises(ConfigError, match=f"{complaint}.* in {Path.cwd()}$"):
        preflight(load(None, [settings]))


def test_the_model_of_an_example_is_fetched_by_make():
    run = load("smollm2-sums", ["model.path=/models/SmolLM2-135M-Instruct"])
    with pytest.raises(ConfigError, match=r"no such directory$"):
        check_directories(run)
    assert load("smollm2-sums").model == PretrainedModel(path=REAL_MODEL)
    assert not_there(REAL_MODEL).endswith("(make real-model, in a checkout, fetches it)")


@pytest.mark.parametrize(
    ("best", "settings", "complaint"),
    [
        ("eval/hard/pass_at_4", [], ""),
        ("eval/hard/pass_at_6", [], ""),
        ("eval/hard/pass_at_3", [], r"eval/hard/pass_at_2, eval/hard/pass_at_4, eval/hard/pass_at_6$"),
        ("eval/hard/pass_at_8", [], r"measures eval/hard/accuracy, eval/hard/pass_at_2, "),
        ("eval/hard/pass_at_1", ["eval.sets.hard.samples=1"], r"measures eval/hard/accuracy$"),
        ("eval/hard/pass_at_2", ["eval.sets.hard.samples=0"], r"measures eval/hard/accuracy$"),
        ("eval/set/pass_at_32", ["eval.sets.set.preset=qurl-aime"], ""),
        ("eval/set/pass_at_64", ["eval.sets.set.preset=qurl-aime"], r"pass_at_16, eval/set/pass_at_32$"),
        ("eval/b/accuracy", ["eval.problems=2"], ""),
        ("eval/b/accuracy", ["eval.problems=1"], r"eval\.problems = 1 asks none of b$"),
        ("", ["eval.sets.a-set.preset=qurl-aime", "rollout.engine.slots=16"], r"32 answers to a problem: roll"),
        ("", ["eval.sets.a-set={preset='qurl-aime', samples=16}", "rollout.engine.slots=16"], ""),
    ],
)  # fmt: skip
def test_a_metric_that_no_evaluation_has_is_refused_at_once(
    best: str, settings: list[str], complaint: str
):
    mixed = ["task={type='mix'}", "task.sources.a.task={type='arithmetic', digits=1, heldout=4}"]
    mixed += ["task.sources.b.task={type='arithmetic', digits=2, heldout=4}"]
    run = load(None, [*mixed, "eval.sets.hard.samples=6", f"eval.best={best}", *settings])
    if not complaint:
        preflight(run)
        return
    with pytest.raises(ConfigError, match=complaint) as refused:
        preflight(run)
    (line,) = refused.value.lines()
    assert line.startswith(
        "eval.best = " if best else "eval.sets.a-set.preset = 'qurl-aime' is of "
    )


def test_an_evaluation_set_without_rows_is_refused(tmp_path: Path):
    """By `areal-q check` and at the start of a run, and by the learner."""
    file = tmp_path / "empty.jsonl"
    file.touch()
    run = load(None, [f"eval.sets.more.task={{type='jsonl', path='{file}'}}"])
    for begin in (preflight, lambda run: problems_of_sets(run, CharTokenizer(), 99)):
        with pytest.raises(TaskError, match=f"^{file}: there are no rows in it$"):
            begin(run)


def test_a_refused_run_leaves_an_earlier_one_where_it_is(tmp_path: Path, taken: int):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    done = areal_q(tmp_path, f"rollout.serve={taken}")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.endswith(f"rollout.serve: 127.0.0.1:{taken}: Address already in use\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_an_order_that_raises_is_refused_before_anything_starts(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def order(number, problems, seed):\n    return problems[0].level"
    )
    done = areal_q(tmp_path, "learner.order.path=mine.py")
    refused(done, "mine.py:2: AttributeError")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("prompt", "answer"), [("say 1", "1"), ("1+1=", "two")])
def test_unreadable_problems_leave_an_earlier_run_in_place(
    tmp_path: Path, prompt: str, answer: str
):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    rows = [{"prompt": f"{i}+2=", "answer": f"{i + 2}"} for i in range(19)]
    rows.append({"prompt": prompt, "answer": answer})
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = areal_q(tmp_path, "task={type='jsonl', path='task.jsonl'}", "warmstart.steps=5")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "the built-in model reads only '0123456789" in done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def test_data_that_are_missing_leave_nothing_behind(tmp_path: Path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    done = areal_q(tmp_path, "task={type='jsonl', path='gone.jsonl'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "areal-q: error: gone.jsonl: No such file or directory\n"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    assert not list((tmp_path / "runs" / "run").iterdir())


@pytest.mark.slow
def test_worker_refuses_what_it_cannot_do_during_warm_start(tmp_path: Path):
    """Two tokens cannot close a call of the calculator; the warm start would take days."""
    tool = 'rollout.environment={type="calculator",close="=+"}'
    done = areal_q(tmp_path, tool, "warmstart.steps=10000000")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "rollout.environment.close = '=+' is 2 tokens, not one" in done.stderr


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--redis", "nonsense"], "rollout: --redis, or REDIS_URL: Redis URL must specify"),
        (["--serve", "99999"], "rollout: rollout.serve (--serve): '99999' is not [HOST:]PORT"),
        (["--serve", "0.0.0.0:8000"], "(--serve-token) must name a file with a token"),
        (["--serve", "TAKEN"], "Address already in use"),
    ],
)
def test_worker_refuses_wrong_options_without_waiting_for_redis(
    taken: int, options: list[str], complaint: str
):
    given = [option.replace("TAKEN", str(taken)) for option in options]
    always = ["--redis", "redis://127.0.0.1:1", "--run", "x"]
    refused(run_here("rollout", worker, *always, *given, who="rollout"), complaint)


def areal_q(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    (directory / "run.toml").touch()
    return subprocess.run(
        [sys.executable, "-m", "areal_q", "run", "run.toml", *settings],
        cwd=directory,
        env={key: value for key, value in os.environ.items() if key != "REDIS_URL"},
        capture_output=True,
        text=True,
    )


def test_learner_refuses_a_taken_port_before_its_warm_start(
    make_run: MakeRun, tmp_path: Path, taken: int
):
    fetch = f"tcp://127.0.0.1:{taken}"
    run, url = make_run("warmstart.steps=1"), "redis://127.0.0.1:1/0"
    with pytest.raises(ConfigError, match=f"broadcast: cannot bind {fetch}"):
        build_learner(run, tmp_path, url, "tcp://127.0.0.1:*", fetch, False, NO_STOP)
    assert not list(tmp_path.iterdir())


def test_learner_refuses_a_misshapen_reference_before_warm_start(make_run: MakeRun, tmp_path: Path):
    other = make_run("model.width=64")
    save_decoder(initial_model(other), tmp_path / "other")
    for name, error, complaint in (
        ("nowhere", CheckpointError, "no such directory"),
        ("other", ConfigError, "not shaped like the policy"),
    ):
        kl = f'learner.reference_kl={{path="{tmp_path / name}"}}'
        run = make_run("warmstart.steps=1", kl)
        task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
        with (
            MetricsLog(tmp_path, tensorboard=False) as metrics,
            pytest.raises(error, match=complaint),
        ):
            build_policy(run, tmp_path, False, task, tokenizer, metrics, NO_STOP)
    assert not read_metrics(tmp_path / "metrics.jsonl")


def test_sglang_refuses_a_missing_directory_before_it_starts():
    pytest.importorskip("aiohttp")
    sglang = ["rollout.engine.type=sglang", "rollout.engine.url=http://127.0.0.1:1"]
    run = load(None, [*sglang, "rollout.engine.directory=/nowhere"])
    with pytest.raises(ConfigError, match=r"rollout\.engine\.directory: no directory /nowhere"):
        build_engine(run.rollout.engine)


FILE = "learner.groups = 5\nrollout.sampling.top_p = 0.9\n"


def test_all_faults_are_reported_each_on_a_line(tmp_path: Path):
    (tmp_path / "run.toml").write_text(FILE)
    done = areal_q(tmp_path, "rollout.sampling.temperature=0", "model.kv_heads=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "areal-q: error: run.toml: learner.groups = 5 is not a multiple of learner.minibatches = 2",
        "areal-q: error: on the command line: rollout.sampling.temperature = 0 draws the same response for a "
        "whole group",
        "areal-q: error: run.toml: rollout.sampling.top_p, top_k and min_p: in training rollout.sampling.top_k "
        "must be from 1 to 512, as each token is recorded with all that it was drawn from",
        "areal-q: error: on the command line: model.heads = 4 is not a multiple of model.kv_heads = 3",
    ]


def test_every_rule_is_listed_once():
    functions = {
        value
        for value in vars(rules).values()
        if callable(value) and getattr(value, "__annotations__", {}).get("run") is Run
    }
    assert functions - {rules.broken_rules} == set(rules.RULES)
    assert len(set(rules.RULES)) == len(rules.RULES)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["buffer.log=false"], ["buffer.tokens"]),
        (["buffer.log=false", "buffer.tokens=false"], []),
        (["checkpoint.sharded=true"], ["checkpoint.sharded"]),
        (["learner.backend.offload=true"], ["learner.backend.offload"]),
        (["learner.oversampling=2"], ["learner.oversampling"]),
        (["learner.oversampling=2", "learner.drop_uniform=true"], []),
        (["learner.oversampling=2", "buffer.sampler.type=freshest"], []),
        (["reward.settings.scale=2"], ["reward.settings"]),
        (["reward.settings.scale=2", "reward.path=mine.py"], []),
        (["reward.settings.scale=2", "task.type=python", "task.path=mine.py"], []),
        ([], []),
    ],
)
def test_a_setting_without_effect_is_named(settings: list[str], named: list[str]):
    said = without_effect(load(None, settings))
    assert [sentence.partition(" ")[0] for sentence in said] == named
