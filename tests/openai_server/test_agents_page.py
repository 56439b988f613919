"""The page docs/agents.md: a loop of openai-agents, with which the small model learns to use a tool."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import wait_until
from helpers.paths import ROOT

import areal_q
from areal_q.messages import Group
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.system.ports import free_ports
from buffer.logs.trajectory_log import iter_log

PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")
EXAMPLES = ROOT / "docs" / "examples"
FILES = ("adder_rows.py", "adder_model.py", "adder.toml", "adder_agent.py")


@pytest.mark.parametrize("file", FILES)
def test_the_page_shows_the_files_of_the_agent(file: str):
    text = (EXAMPLES / file).read_text("utf-8")
    kind = "toml" if file.endswith(".toml") else "python"
    assert f"```{kind}\n# {file}\n{text}```" in PAGE
    assert len(text.splitlines()) <= 30


class Place:
    """A directory with the files of the page, and the programs that run there."""

    def __init__(self, root: Path, programs: ExitStack) -> None:
        self.root, self._programs = root, programs
        for file in FILES:
            shutil.copy(EXAMPLES / file, root)
        (self.port,) = free_ports(1)

    @contextmanager
    def program(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        name = f"{len([*self.root.glob('*.log')])}.log"
        with open(self.root / name, "w") as log:
            process = subprocess.Popen(
                [sys.executable, *args], cwd=self.root, stdout=log, stderr=subprocess.STDOUT,
                text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()

    def start(self, *args: str) -> subprocess.Popen[str]:
        return self._programs.enter_context(self.program(*args))

    def agent(self) -> subprocess.Popen[str]:
        return self.start("adder_agent.py", f"http://127.0.0.1:{self.port}/v1")

    def do(self, *args: str) -> None:
        process = self.start(*args)
        assert process.wait() == 0, self.said()

    def said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.root.glob("*.log")))

    @property
    def records(self) -> list[Record]:
        path = self.root / "runs" / "adder" / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def groups(self) -> list[Group]:
        log = iter_log(self.root / "runs" / "adder" / "trajectories", 0, 1000)
        return [group for _, step in log for group in step]


def child_of(process: subprocess.Popen[Any], module: str) -> int:
    """The process that runs `python -m module` for one that was started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = (path.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == process.pid and f"\0-m\0{module}\0" in line:
            return int(path.parent.name)
    raise AssertionError(f"no {module}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as programs:
        yield Place(tmp_path, programs)


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_the_small_model_learns_a_tool_from_an_agents_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    """With fewer steps. The agent and then the worker are killed while they play: both lose their open
    episodes, which others play. Before and after, the agent plays the held-out problems."""
    pytest.importorskip("agents", reason="needs openai-agents: make test-pages")
    place.do("adder_rows.py")
    place.do("adder_model.py")
    sft = ("steps=200", "learner.optimizer.lr=2e-3", "learner.optimizer.decay_steps=200")
    place.do("-m", "areal_q", "sft", "adder.toml", *sft, "eval.every=200", "checkpoint.every=200")
    settings = ["model.path=runs/adder-sft/hf", f"rollout.serve={place.port}", "steps=8"]
    more = ["eval.problems=32", "eval.every=8", "rollout.environment.episode_timeout_s=5"]
    run = place.start("-m", "areal_q", "run", "adder.toml", *settings, *more)

    def wait(holds: Callable[[Record], object], *processes: subprocess.Popen[Any]) -> None:
        wait_until(lambda: any(map(holds, place.records)), place.said, *processes)

    wait(lambda r: r["kind"] == "waiting", run)
    first = place.agent()
    wait(lambda r: r.get("rollout/open_episodes", 0) > 1, run, first)
    first.kill()
    second = place.agent()
    wait(lambda r: r["kind"] == "eval", run, second)
    wait(lambda r: r["kind"] == "step", run, second)
    os.kill(child_of(run, "rollout"), signal.SIGKILL)
    assert run.wait() == 1 and "to go on: areal-q run runs/adder --resume" in place.said()
    second.kill()
    began_s = time.time()
    run = place.start("-m", "areal_q", "run", "runs/adder", "--resume")
    wait(lambda r: r["kind"] == "waiting" and r["time_s"] > began_s, run)
    place.agent()
    assert run.wait() == 0, place.said()

    taken = [r for r in place.records if r["kind"] == "step"]
    rewards = [r["reward/mean"] for r in taken]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.3, rewards
    before, *_, after = [r for r in place.records if r["kind"] == "eval"]
    assert after["eval/accuracy"] >= before["eval/accuracy"]
    assert after["eval/turns"] >= before["eval/turns"] > 1
    numbers = [group.ticket.number for group in place.groups]
    assert len(numbers) == len({*numbers}) == 8 * len(taken), "no group counts twice"
    monkeypatch.chdir(place.root)
    assert areal_q.replay("runs/adder")
