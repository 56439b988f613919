"""`reward.settings`: what a reward of one's own has parameters for, whatever kind of reward it is."""

import asyncio
import re
from pathlib import Path

import pytest

from areal_q.config import Run, dump_toml, load, settings_hash
from areal_q.errors import TaskError
from areal_q.tasks import Completed, Problem, Score, build_reward, check_reward
from areal_q.tasks.grading.own_reward import load_reward

SETTABLE = """
def reward(response, answer, *, scale, power=1):
    return [response, answer, scale, power]

def any_names(question, reply, truth, scale, power=1):
    return [reply, truth, scale, power]

def everything(response, answer, **more):
    return [response, answer, more["scale"], more["power"]]

def reward_group(rows, scale, power=1):
    return [rows[0]["response"], rows[0]["answer"], scale, power]

def of_trl(completions, answer, level, scale, power=1, log_extra=None):
    assert log_extra and level == [3, 3]
    return [completions[0], answer[0], scale, power]

def of_trl_and_all(completions, **columns):
    assert columns["level"] == [3, 3]
    return [completions[0], columns["answer"][0], columns["scale"], columns["power"]]

class Own:
    def __call__(self, response, answer, scale, power=1):
        return [response, answer, scale, power]

own = Own()
"""
FUNCTIONS = [*re.findall(r"^def (\w+)", SETTABLE, re.M), "own"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reward_gets_its_settings_by_name(tmp_path: Path, name: str):
    """Also one that the data have a column of."""
    (tmp_path / "mine.py").write_text(SETTABLE)
    scorer = load_reward(str(tmp_path / "mine.py"), name, {"scale": 2.5, "power": 3})
    problem = Problem("q", "4", columns='{"answer": "4", "level": 3, "scale": 0}')
    assert scorer.call(problem, [Completed("r"), Completed("s")], 0) == ["r", "4", 2.5, 3]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("setting", ["scael", "completions", "rows", "response"])
def test_a_setting_that_a_reward_does_not_take_is_refused(tmp_path: Path, name: str, setting: str):
    (tmp_path / "mine.py").write_text(SETTABLE)
    if setting == "scael" and name in ("everything", "of_trl_and_all"):
        return
    with pytest.raises(TaskError, match=rf"mine\.py:\d+: takes no setting `{setting}`, which"):
        load_reward(str(tmp_path / "mine.py"), name, {"scale": 1, setting: 2})


OF_A_DATE = """
import datetime, math

def problems():
    return [("q", "4")] * 10

def reward(response, to, *, day, bound=0.0):
    kept = day == datetime.date(2026, 1, 31) and bound == math.inf
    return {"reward": to["here"], "kept": kept}
"""


async def scored(run: Run) -> list[Score]:
    reward = build_reward(run)
    try:
        await reward.start()
        return await reward(Problem("q", "4"), [Completed("4")])
    finally:
        await reward.close()


@pytest.mark.parametrize(
    ("table", "more"),
    [
        ("reward", ["reward.path='mine.py'"]),
        ("reward", ["task.type=python", "task.path=mine.py"]),
        (
            "task.sources.a.reward",
            [
                *("task.type=mix", "task.sources.b.task.type=arithmetic"),
                *("task.sources.a.task.type=arithmetic", "task.sources.a.reward.path=mine.py"),
            ],
        ),
    ],
)
def test_settings_of_a_reward_reach_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, more: list[str]
):
    """All that TOML has: tables, dates and infinities."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OF_A_DATE)
    given = f"{table}.settings={{to = {{here = 0.5}}, day = 2026-01-31, bound = inf}}"
    run = load(None, [*more, given])
    (tmp_path / "config.toml").write_text(dump_toml(run))
    assert load(tmp_path / "config.toml") == run
    run = load(tmp_path / "config.toml")
    check_reward(run)
    assert asyncio.run(scored(run.of(run.sources[0]))) == [Score(0.5, False, {"kept": 1.0})]
    assert settings_hash(run) != settings_hash(load(None, more))
