"""A mixture whose tasks have advantages of their own, resumed, and replayed with them and with others."""

from pathlib import Path

import pytest
from helpers.commands import areal_q
from helpers.paths import ROOT

from areal_q.errors import TaskError
from learner.replay.replay_steps import Replay

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
STEPS = 8
SETTINGS = [
    *("model.width=32", "model.layers=1", "model.mlp=64", "warmstart.steps=60", "name=mix"),
    *("learner.groups=8", "learner.group_size=4", "learner.optimizer.lr=1e-3", "eval.problems=4"),
    *("checkpoint.every=3", "steps=5", "task={type='mix'}", "learner.advantage.type=by_source"),
    *(
        "task.sources.one.task={type='arithmetic', digits=1, heldout=9}",
        "task.sources.one.weight=3",
    ),
    *("task.sources.two.task={type='arithmetic', digits=2, heldout=9}",),
    *("learner.advantage.sources.one.type=rloo", "learner.advantage.sources.two.path=mine.py"),
]
MINE = """
def advantage(rewards, group_ids, times=3.0):
    return times * (rewards - 0.5)
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("mixed")
    (cwd / "mine.py").write_text(MINE)
    quickstart = str(ROOT / "configs" / "quickstart.toml")
    for args in ([quickstart, *SETTINGS], ["runs/mix", "--resume", f"steps={STEPS}"]):
        areal_q(cwd, "run", *args)
    return cwd


def test_advantages_by_source_are_replayed_bit_for_bit(mixed: Path):
    replay = Replay(mixed / "runs" / "mix")
    steps = list(replay.steps())
    assert [one.record.step for one in steps] == list(range(STEPS))
    for one in steps:
        assert one.metrics == one.record.metrics
    assert any(0 < one.metrics.get("source/two/share", 0) < 1 for one in steps)
    assert not replay.what_if


def test_another_advantage_of_one_source_is_another_history(mixed: Path):
    replay = Replay(mixed / "runs" / "mix", ["learner.advantage.sources.two.settings.times=0.0"])
    steps = list(replay.steps())
    assert replay.what_if and replay.changes == {"learner.advantage.sources.two.settings.times"}
    assert any(one.metrics != one.record.metrics for one in steps)  # the first may lack that source


def test_the_code_of_one_source_is_that_of_the_run(mixed: Path):
    file = mixed / "mine.py"
    file.write_text(MINE.replace("0.5", "0.25"))
    try:
        with pytest.raises(TaskError, match=r"--set learner\.advantage\.sources\.two\.path=FILE"):
            Replay(mixed / "runs" / "mix")
        assert Replay(
            mixed / "runs" / "mix", [f"learner.advantage.sources.two.path={file}"]
        ).what_if
    finally:
        file.write_text(MINE)
