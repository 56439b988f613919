"""Problems of reasoning-gym, by a stand-in whose scorer evaluates answers, as some of its own do."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest
from helpers.commands import stretched
from helpers.paths import ROOT

from areal_q.config import Run, load
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import Completed, Score, build_reward, build_task, check_reward
from areal_q.tasks.datasets import procedural
from rollout.evaluation.kept_rows import row_of

STAND_IN = """
import random

def create_dataset(name, seed, size, largest=9):
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(seed, largest)

class Sums:
    def __init__(self, seed, largest):
        self.seed, self.largest = seed, largest

    def __getitem__(self, index):
        rng = random.Random(self.seed + index)
        a, b = rng.randint(0, self.largest), rng.randint(0, self.largest)
        return {"question": f"{a}+{b}=", "answer": str(a + b), "metadata": {"source_index": index}}

    def score_answer(self, answer, entry):
        return 0.0 if answer is None else float(eval(answer) == int(entry["answer"]))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "reasoning_gym.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), str(ROOT)]))
    monkeypatch.delitem(sys.modules, "reasoning_gym", raising=False)
    monkeypatch.setattr(procedural, "_dataset", procedural._dataset.__wrapped__)


def run_of(*settings: str) -> Run:
    table = ["type=reasoning-gym", "dataset=sums", "template=plain", "problems=200", "heldout=20"]
    limit = f"reward.timeout_s={stretched(20)}"
    return load(None, [*(f"task.{entry}" for entry in table), limit, *settings])


def test_problems_follow_from_settings_and_seed(installed):
    first, again = (build_task(run_of("task.settings={ largest = 30 }").task) for _ in range(2))
    assert [*first.train] == [*again.train] and len(first.train) == 200
    other = build_task(run_of("task.settings={ largest = 30 }", "task.seed=999").task)
    assert [*first.train] != [*other.train]
    prompt = first.train[0].prompt
    a, b = prompt.partition("=")[0].split("+")
    assert int(a) + int(b) == int(first.train[0].answer)


def test_nothing_that_is_held_out_is_trained_on(installed):
    task = build_task(run_of().task)
    held = {problem.prompt for problem in task.heldout}
    assert len(task.heldout) == 20
    assert held & {problem.prompt for problem in task.train} == set()
    with pytest.raises(TaskError, match="holds out all problems of sums"):
        build_task(run_of("task.settings={ largest = 0 }").task)


def test_a_problem_that_is_kept_has_prompt_and_answer(installed):
    """As rows of a file have, which it is of none of."""
    run = run_of()
    problem = build_task(run.task).train[0]
    row = row_of(problem, run.task)
    assert (row["prompt"], row["answer"]) == (problem.prompt, problem.answer)
    assert row["dataset"] == "sums"


def scores(run: Run, *answers: str) -> list[Score]:
    """Returns what the run's reward gives for answers to the first problem."""

    async def scored() -> list[Score]:
        reward = build_reward(run)
        await reward.start()
        try:
            problem = build_task(run.task).train[0]
            texts = [a.replace("RIGHT", problem.answer) for a in answers]
            return [(await reward(problem, [Completed(text)]))[0] for text in texts]
        finally:
            await reward.close()

    return asyncio.run(scored())


def test_scorer_of_the_dataset_gives_the_reward(walls, installed):
    texts = ("<answer>3</answer> no, <answer> RIGHT </answer>", "<answer>-1</answer>", "RIGHT")
    assert [(s.reward, s.correct, s.valid) for s in scores(run_of(), *texts)] == [
        (1.0, True, True),
        (0.0, False, True),
        (0.0, False, True),
    ]


def test_answer_that_is_a_program_reaches_nothing(walls, installed, tmp_path):
    there = tmp_path / "there"
    programs = (
        f"open({str(there)!r}, 'w')",
        "__import__('os').fork() * 0 + RIGHT",
        "__import__('socket').socket() and RIGHT",
        "__import__('os')._exit(0)",
        "open('/proc/self/environ').read() and RIGHT",
    )
    found = scores(run_of(), *(f"<answer>{program}</answer>" for program in programs))
    assert [(score.reward, score.valid) for score in found] == [(0.0, True)] * len(programs)
    assert not there.exists()


def test_every_thread_of_the_scorer_is_confined(walls, installed, monkeypatch):
    for name in ("OMP", "OPENBLAS", "MKL"):  # NumPy's libraries begin threads
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "secret")

    async def seen() -> tuple[list[str], bytes]:
        reward = build_reward(run_of())
        await reward.start()
        try:
            below = psutil.Process().children(recursive=True)
            (child,) = (p for p in below if p.parent() in below)
            statuses = Path(f"/proc/{child.pid}/task").glob("*/status")
            lines = [line for one in statuses for line in one.read_text().splitlines()]
            environment = Path(f"/proc/{child.pid}/environ").read_bytes()
            return [line for line in lines if line.startswith("Seccomp:")], environment
        finally:
            await reward.close()

    walled, environment = asyncio.run(seen())
    assert walled and {*walled} == {"Seccomp:\t2"}
    assert b"SECRET_OF_THIS_TEST" not in environment


@pytest.mark.parametrize(
    ("begun", "settings", "said"),
    [
        ("import threading\nthreading.Timer(60, int).start()", (), "has 2 threads"),
        ("", ("reward.memory_mib=0",), "no bound on its memory"),
    ],
)
def test_scorer_that_cannot_be_confined_is_refused(begun, settings, said, installed, tmp_path):
    module = tmp_path / "site-packages" / "reasoning_gym.py"
    module.write_text(f"{STAND_IN}\n{begun}")
    reward = build_reward(run_of(*settings))

    async def started() -> None:
        try:
            await reward.start()
        finally:
            await reward.close()

    with pytest.raises(TaskError, match=said):
        asyncio.run(started())


def test_what_is_missing_is_named(installed, monkeypatch):
    with pytest.raises(TaskError, match=r"task.dataset.* Dataset 'other' not registered"):
        build_task(run_of("task.dataset=other").task)
    with pytest.raises(TaskError, match=r"task.settings: sums: .*unexpected keyword argument 'x'"):
        build_task(run_of("task.settings={ x = 1 }").task)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for refuse in (check_reward, lambda run: build_task(run.task)):
        with pytest.raises(ConfigError, match=r"pip install .*\[reasoning-gym\]"):
            refuse(run_of())
