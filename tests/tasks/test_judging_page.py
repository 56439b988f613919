"""docs/judging.md: its rewards, run as a worker runs them."""

import asyncio
import re
from pathlib import Path

from helpers.commands import stretched
from helpers.paths import ROOT

from areal_q.config import load
from areal_q.tasks import Completed, Score, build_reward, build_task

PAGE = (ROOT / "docs" / "judging.md").read_text()


def file_of(name: str) -> str:
    """Returns the code on the page that begins with the name of its file."""
    (code,) = re.findall(rf"```python\n# {name}\n(.*?)\n```\n", PAGE, re.DOTALL)
    return code


def scores(path: Path, *texts: str, settings: tuple[str, ...] = ()) -> list[Score]:
    """Returns what a run's reward gives for responses to the first problem of the file at `path`."""
    run = load(None, [
        "task.type=python", f"task.path={path}", f"reward.timeout_s={stretched(20)}", *settings,
    ])  # fmt: skip
    problem = build_task(run.task, None).train[0]

    async def scored() -> list[Score]:
        reward = build_reward(run)
        await reward.start()
        try:
            return await reward(problem, [Completed(text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(scored())


def test_reward_on_the_page_runs_what_a_model_wrote(tmp_path):
    path = tmp_path / "times.py"
    path.write_text(file_of("times.py").replace("timeout_s=2.0", f"timeout_s={stretched(5)}"))
    right = "def times_2(x):\n    return x + x"
    found = scores(
        path, f"So:\n```python\n{right}\n```\n", right, "def times_2(x): return 0", "exit(0)"
    )
    assert [score.reward for score in found] == [1, 1, 0, 0]
    assert [score.notes["why"].split(":")[0] for score in found] == [
        "passed",
        "passed",
        "failed",
        "error",
    ]
