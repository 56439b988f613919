"""The pages docs/agents.md and docs/verifiers.md: the real model learns to use its tool, from a loop of
openai-agents and from an environment of verifiers."""

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
from helpers.openai_server.verifiers_place import PYTHON
from helpers.paths import REAL_MODEL, ROOT

import areal_q
from areal_q.observability.metrics_log import Record, read_metrics
from areal_q.system.ports import free_ports
from buffer.logs.trajectory_log import iter_log

EXAMPLES = ROOT / "docs" / "examples"
FILES = {
    "agents": ("adder_rows.py", "tools.jinja", "adder.toml", "adder_agent.py"),
    "verifiers": ("asker_rows.py", "asker.toml", "asker.py"),
}
SFT = ("steps=8", "learner.optimizer.lr=5e-5", "checkpoint.every=8")
SHOWN = {".py": "```python\n# {}\n", ".toml": "```toml\n# {}\n", ".jinja": "```text\n"}


@pytest.mark.parametrize(("page", "file"), [(page, file) for page in FILES for file in FILES[page]])
def test_the_pages_show_the_files_of_the_agents(page: str, file: str):
    text = (EXAMPLES / file).read_text("utf-8")
    begins = SHOWN[Path(file).suffix].format(file)
    assert f"{begins}{text}```" in (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert len(text.splitlines()) <= 30


class Place:
    """A directory with the files of a page and the real model, and the programs that run there."""

    def __init__(self, root: Path, programs: ExitStack) -> None:
        self.root, self._programs = root, programs
        for file in sum(FILES.values(), ()):
            shutil.copy(EXAMPLES / file, root)
        (root / "models").mkdir()
        (root / "models" / REAL_MODEL.name).symlink_to(REAL_MODEL)
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

    def kill(self, words: str) -> None:
        """Kills the process here whose command has these words. It is no child of the test's."""
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if (
                    words in command.read_text().replace("\0", " ")
                    and (command.parent / "cwd").readlink() == self.root
                ):
                    return os.kill(int(command.parent.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended
        raise AssertionError(f"no {words}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as programs:
        yield Place(tmp_path, programs)


@pytest.mark.pages
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not REAL_MODEL.is_dir(), reason="needs the real model: make real-model")
@pytest.mark.parametrize("name", ["adder", "asker"])
def test_the_real_model_learns_a_tool(place: Place, name: str, monkeypatch: pytest.MonkeyPatch):
    """In ten steps. What plays the episodes and then the worker are killed while they play: both lose their
    open episodes, which others play. Before and after, the held-out problems are played."""
    by_agent, more = name == "adder", [f"rollout.serve={place.port}"]
    if by_agent:
        pytest.importorskip("agents", reason="needs openai-agents: make test-pages")
        more += ["rollout.environment.episode_timeout_s=5"]
    elif PYTHON:
        more = [f"task.python={PYTHON}"]
    else:
        pytest.skip("needs verifiers: make test-pages")
    directory = place.root / "runs" / name

    def wait(holds: Callable[[Record], object], *processes: subprocess.Popen[Any]) -> None:
        log = directory / "metrics.jsonl"
        wait_until(
            lambda: log.exists() and any(map(holds, read_metrics(log))), place.said, *processes
        )

    place.do(f"{name}_rows.py")
    place.do("-m", "areal_q", "sft", f"{name}.toml", *SFT)
    settings = [f"model.path=runs/{name}-sft/hf", "steps=10", "eval.problems=32"]
    run = place.start("-m", "areal_q", "run", f"{name}.toml", *settings, *more)
    wait(lambda r: r["kind"] == "waiting", run)
    players = [place.agent()] if by_agent else []
    wait(lambda r: r.get("rollout/open_episodes", 0) > 1, run, *players)
    if by_agent:
        players.pop().kill()
        players.append(place.agent())
    else:
        place.kill("verifiers_player.py")
    wait(lambda r: r["kind"] == "eval", run, *players)
    wait(lambda r: r["kind"] == "step", run, *players)
    place.kill("-m rollout")
    assert run.wait() == 1 and f"to go on: areal-q run runs/{name} --resume" in place.said()
    for player in players:
        player.kill()
    began_s = time.time()
    run = place.start("-m", "areal_q", "run", f"runs/{name}", "--resume")
    wait(lambda r: r["kind"] == "waiting" and r["time_s"] > began_s, run)
    if by_agent:
        place.agent()
    assert run.wait() == 0, place.said()

    records = read_metrics(directory / "metrics.jsonl")
    taken = [r for r in records if r["kind"] == "step"]
    before, *_, after = [r for r in records if r["kind"] == "eval"]
    assert 1 - after["eval/accuracy"] <= (1 - before["eval/accuracy"]) / 2 < 0.5
    assert after["eval/turns"] >= before["eval/turns"] >= 1
    log = iter_log(directory / "trajectories", 0, 1000)
    numbers = [group.ticket.number for _, step in log for group in step]
    assert len(numbers) == len({*numbers}) == 4 * len(taken), "no group counts twice"
    monkeypatch.chdir(place.root)
    assert areal_q.replay(f"runs/{name}")
