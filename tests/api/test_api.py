"""The Python API: the settings that a command line would have, from a notebook's loop and from a thread too."""

import asyncio
import functools
import inspect
import json
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

import areal_q
from areal_q.config import Run, dump_toml, load
from areal_q.errors import CheckpointError, ConfigError, TaskError, UserError
from areal_q.runner.child_processes import Interrupts
from areal_q.system.run_dir import METRICS_FILE
from rollout.evaluation import evaluate

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in range(20)]
TINY = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 48},
    "learner.groups": 4,
    "learner.group_size": 2,
    "rollout.sampling.max_tokens": 4,
    "warmstart.steps": 2,
}


def mine(response: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"reward": len(response), "why": f"level {row['level']}"}


class Launched(Exception):
    pass


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Run]:
    """The runs that would be launched, in a directory of the test's own."""
    runs: list[Run] = []

    def launch(run: Run, resume: bool, view: object) -> int:
        runs.append(run)
        raise Launched

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("areal_q.api.launch", launch)
    return runs


def test_a_run_goes_on_as_the_command_line_lets_it(launched: list[Run], tmp_path: Path):
    """It was launched with whatever was given, and lost the settings that it had begun with."""
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        areal_q.train(name="n", resume=True)
    directory = tmp_path / "runs" / "n"
    (directory / "checkpoints" / "step-000001").mkdir(parents=True)
    file = directory / "config.toml"
    file.write_text(dump_toml(load(None, ["name=n", "learner.dtype=float32"])))
    with pytest.raises(ConfigError, match=r"learner\.group_size: cannot change"):
        areal_q.train(name="n", settings={"learner.group_size": 2}, resume=True)
    with pytest.raises(Launched):
        areal_q.train(name="n", steps=999, resume=True)
    (directory / "checkpoints" / "step-001000").mkdir()
    with pytest.raises(ConfigError, match=r"steps = 999: .* is at step 1000 already"):
        areal_q.train(name="n", steps=999, resume=True)
    (run,) = launched
    assert (run.steps, run.learner.dtype) == (999, "float32")
    mended = tmp_path / "mended.py"
    mended.write_text("def reward(response):\n    return 1.0\n")
    with pytest.raises(Launched):
        areal_q.train(name="n", steps=1001, reward=str(mended), resume=True)
    assert launched[-1].reward.path == str(mended)
    file.write_text(
        dump_toml(load(None, ["name=n", "learner.dtype=float32", "learner.reference_kl={}"]))
    )
    with pytest.raises(ConfigError, match="reference_kl"):
        areal_q.train(name="n", steps=999, resume=True)


def test_a_call_means_what_a_command_line_does(launched: list[Run], tmp_path: Path):
    settings = {"learner.groups": 8, "task.heldout": 0.5}
    with pytest.raises(Launched):
        areal_q.train(
            "DIR",
            iter(ROWS),
            mine,
            7,
            name="n",
            objective="mine.py",
            order="easy.py:order",
            sampler="easy.py",
            environment="env.py",
            tracker="mine.py",
            settings=settings,
        )
    (rows,) = (tmp_path / "runs" / "inputs").iterdir()
    assert launched == [
        load(
            None,
            [
                *('model={type="pretrained", path="DIR"}', "steps=7", "name=n"),
                f'task={{type="jsonl", path="{rows}", heldout=0.5}}',
                *("learner.objective.path=mine.py", "learner.groups=8"),
                *("learner.order.path=easy.py:order", "buffer.sampler.path=easy.py"),
                "rollout.environment.path=env.py",
                "trackers=[{type='python', path='mine.py'}]",
                f'reward.path="{__name__}:mine"',  # of a package; another process must find that
            ],
        )
    ]
    assert [json.loads(line) for line in rows.read_text().splitlines()] == ROWS


@pytest.mark.parametrize(("data", "heldout"), [("a.csv", "b.csv"), ("a/b:c@d", "a/b:c/test@d")])
def test_data_of_a_file_keep_the_task_that_reads_it(launched: list[Run], data: str, heldout: str):
    model = {"model": {"type": "pretrained", "path": "DIR"}}
    for config, kind in (("gsm8k", "gsm8k"), (None, "jsonl")):
        with pytest.raises(Launched):
            areal_q.train(None, data, heldout=heldout, config=config, settings=model)
        task: Any = launched[-1].task
        assert (task.__struct_config__.tag, task.path, task.heldout) == (kind, data, heldout)


def test_conversations_are_asked_in_the_models_own_format(launched: list[Run]):
    rows = [{"prompt": [{"role": "user", "content": "q"}], "label": 1}] * 2
    with pytest.raises(Launched):
        areal_q.train("DIR", rows, mine, heldout=rows)
    task: Any = launched[-1].task
    assert task.template == "chat" and task.path == task.heldout
    assert [json.loads(line)["answer"] for line in Path(task.path).read_text().splitlines()] == [
        ""
    ] * 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            {"settings": {"learner.gruops": 1}},
            "settings: learner.gruops: no such setting; did you mean",
        ),
        ({"settings": ["steps=1"]}, "settings: must be a table of names and values, not list"),
        ({"data": [1]}, "data[0]: a row must be a table, not int"),
        ({"data": 3}, "data: must be tables, a file or a data set of the Hub, not int"),
        ({"reward": lambda response: 1.0, "data": ROWS}, "it is a lambda, or part of a line"),
    ],
)
def test_what_is_wrong_with_a_call_is_one_line(
    launched: list[Run], call: dict[str, Any], said: str
):
    with pytest.raises((ConfigError, TaskError)) as refused:
        areal_q.train(**call)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_or_an_option_that_is_not_there_is_named(tmp_path: Path):
    misspelt: dict[str, Any] = {"sampels": 4}
    for call, said in (
        (lambda: areal_q.opened(tmp_path / "no"), f"{tmp_path / 'no'}: no such run"),
        (
            lambda: areal_q.evaluate("runs/r", **misspelt),
            "evaluate: no option 'sampels'; did you mean 'samples'?",
        ),
        (areal_q.report, "report: of which runs?"),
    ):
        with pytest.raises(UserError) as refused:
            call()
        assert str(refused.value) == said


def test_no_thread_but_the_main_one_handles_signals():
    counted: list[int] = []

    def work() -> None:
        with Interrupts() as interrupts:
            counted.append(interrupts.count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counted == [0]


def test_a_run_that_was_terminated_ends_its_script(
    launched: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It went on as if the run were done, and ended with 0."""
    monkeypatch.setattr("areal_q.api.launch", lambda run, resume, view: 143)
    with pytest.raises(SystemExit) as ended:
        areal_q.train()
    assert ended.value.code == 143


def test_an_evaluation_takes_the_options_of_the_command(monkeypatch: pytest.MonkeyPatch):
    """Each by its name, a path as a text."""
    main, taken = evaluate.main, []
    taking = functools.wraps(main)(lambda *a, **given: taken.append((a, given)))
    monkeypatch.setattr(evaluate, "main", taking)
    own: dict[str, Any] = {"set": "hard", "serve": 8000, "out": "a.jsonl", "serve_token": "t"}
    areal_q.evaluate("runs/r", "d.jsonl", samples=2, greedy=False, **own)
    ((args, given),) = taken
    bound = inspect.signature(main).bind(*args, **given).arguments
    assert bound["of_set"] == "hard" and bound["serve_at"] == "8000"
    paths = ("model", "data", "out", "serve_token")
    assert [bound[name] for name in paths] == [
        Path(it) for it in ("runs/r", "d.jsonl", "a.jsonl", "t")
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_notebook_trains_evaluates_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It trains in a thread beside the loop that runs, and does the rest in the loop's own, as a cell does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(response): return {'reward': len(response)}")
    call: dict[str, Any] = {
        "reward": "mine.py", "steps": 2, "settings": TINY, "progress": False,
    }  # fmt: skip
    run = await asyncio.to_thread(lambda: areal_q.train(data=ROWS, name="thread", **call))
    assert run.directory == Path("runs/thread") and (run.directory / "hf").is_dir()
    assert [step for step, _ in run.metric("reward/mean")] == [1, 2]
    assert run.accuracy is not None
    assert areal_q.replay(run)
    assert areal_q.evaluate(run, problems=2).answered == 2
    assert areal_q.opened("runs/thread") == run


STOPPED = """
import asyncio, os, signal, sys, time, types
import areal_q

def ever(*_):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(0.01)

async def cell():
    try:
        areal_q.replay("run")
    except KeyboardInterrupt:
        print("stopped")

sys.modules["learner.replay.cli"] = types.SimpleNamespace(main=ever)
asyncio.new_event_loop().run_until_complete(cell())
"""


def test_a_notebooks_stop_button_stops_what_goes_on():
    """It waited for the end of the work."""
    command = [sys.executable, "-c", STOPPED]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "stopped\n"


EXAMPLES = {
    name: (ROOT / "docs" / "examples" / f"{name}.py").read_text("utf-8")
    for name in ("train", "parts")
}


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "train"), ("docs/api.md", "train"), ("docs/api.md", "parts")]
)
def test_the_pages_show_the_examples_as_they_are(page: str, name: str):
    assert f"```python\n{EXAMPLES[name]}```" in (ROOT / page).read_text("utf-8")


def test_ten_lines_train():
    assert len([line for line in EXAMPLES["train"].splitlines() if line.strip()]) <= 10


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "metric"), [("train", "mean"), ("parts", "part_carries")])
def test_the_examples_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, metric: str
):
    """With fewer steps."""
    (tmp_path / "train.py").write_text(re.sub(r"(steps=|steps\": )\d+", r"\g<1>2", EXAMPLES[name]))
    monkeypatch.chdir(tmp_path)
    run = runpy.run_path("train.py", run_name="__main__")["run"]
    assert [step for step, _ in run.metric(f"reward/{metric}")] == [1, 2]
    assert (run.directory / METRICS_FILE).is_file()
