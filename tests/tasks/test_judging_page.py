"""docs/judging.md: its rewards, run as a worker runs them."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from helpers.commands import stretched
from helpers.openai_server.stand_in import Server, reply
from helpers.paths import ROOT

import areal_q
from areal_q.config import load
from areal_q.tasks import Completed, Score, build_reward, build_task
from buffer.logs.trajectory_log import iter_log

PAGE = (ROOT / "docs" / "judging.md").read_text()


def file_of(name: str, kind: str = "python") -> str:
    """Returns the code on the page that begins with the name of its file."""
    (code,) = re.findall(rf"```{kind}\n# {name}\n(.*?)\n```\n", PAGE, re.DOTALL)
    return code


def judged(text: str) -> web.Response:
    """Returns the verdict of a judge that compares the reply with the reference."""
    parts = re.fullmatch(
        r".*<reference>(.*)</reference>\n<reply>(.*)</reply>\nWhat matters: (.*?)\n.*",
        text,
        re.DOTALL,
    )
    assert parts and parts[3] == "the sum", text
    return reply(f"It says {parts[2]!r}.\nScore: {10 * (parts[1] == parts[2])}")


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


def test_reward_on_the_page_runs_what_a_model_wrote(walls, tmp_path):
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


def test_reward_on_the_page_adds_a_judge_to_a_grader(tmp_path):
    path, server = tmp_path / "both.py", Server(reply("Very. Score: 5"))

    async def use(url: str) -> list[Score]:
        problems = "\n\ndef problems():\n    return [('2+2=', '4'), ('3+3=', '6')]\n"
        code = file_of("both.py").replace("http://127.0.0.1:8000/v1", url)
        path.write_text(code + problems)
        return await asyncio.to_thread(scores, path, "4", "5", settings=("task.heldout=0.5",))

    found = asyncio.run(server.told(use))
    assert [(one.reward, one.correct) for one in found] == [(0.9, True), (0.1, False)]
    assert found[0].notes == {"judge": "Very. Score: 5"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_run_on_the_page_is_rewarded_by_its_judge(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": f"{a}+{b}=", "reference": f"{a + b}", "rubric": "the sum"}
        for a in range(30)
        for b in range(30)
    ]
    Path("questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = {
        "model": {"type": "small"},
        "task.template": "plain",
        "warmstart": {"steps": 60},
        "learner.groups": 8,
        "rollout.sampling": {"max_tokens": 4},
        "eval.every": 4,
    }

    async def use(url: str) -> areal_q.Trained:
        Path("judged.toml").write_text(
            file_of("judged.toml", "toml").replace("http://127.0.0.1:8000/v1", url)
        )
        train = partial(
            areal_q.train, config="judged.toml", steps=4, settings=small, progress=False
        )
        return await asyncio.to_thread(train)

    server = Server(judged)
    run = asyncio.run(server.told(use))
    log = iter_log(run.directory / "trajectories", 0, 4)
    trajectories = [t for _, groups in log for group in groups for t in group.trajectories]
    assert {t.reward for t in trajectories} == {0.0, 1.0}
    said = {t.reward_notes["judge"].partition("Score: ")[2]: t.reward for t in trajectories}
    assert said == {"0": 0.0, "10": 1.0}
    assert len(server.asked) < len(trajectories)
    assert run.accuracy is not None and run.accuracy > 0
