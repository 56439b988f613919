"""An objective in a user's own file, over a run that is resumed, and replayed with it and without."""

import shutil
from pathlib import Path

import pytest
import typer
from helpers.commands import areal_q
from helpers.paths import ROOT

from areal_q.config import load
from areal_q.errors import TaskError, UserError
from areal_q.system.run_dir import claimed, resumed
from buffer.logs.step_log import iter_steps
from learner.replay import cli
from learner.replay.replay_steps import Replay

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
"""The first of them waits for two runs, each of them resumed"""
STEPS, FORK = 20, 11
SETTINGS = [
    *("model.width=32", "model.layers=1", "model.mlp=64", "task.digits=1", "task.heldout=20"),
    *("warmstart.steps=60", "learner.groups=8", "learner.group_size=4", "learner.minibatches=2"),
    *("learner.optimizer.lr=1e-3", "checkpoint.every=4", "eval.problems=4", f"steps={FORK}"),
]
OWN_TIS = (ROOT / "tests" / "helpers" / "own_code" / "own_tis.py").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with mine.py, and with runs of TIS, once built in and once from there, each resumed."""
    cwd = tmp_path_factory.mktemp("own")
    (cwd / "mine.py").write_text(OWN_TIS)
    quickstart = str(ROOT / "configs" / "quickstart.toml")
    for name, chosen in (("tis", "type=tis"), ("own", "path=mine.py")):
        for args in (
            [quickstart, *SETTINGS, f"name={name}", f"learner.objective.{chosen}"],
            [f"runs/{name}", "--resume", f"steps={STEPS}"],
        ):
            areal_q(cwd, "run", *args)
    return cwd


@pytest.mark.parametrize(
    ("name", "settings"),
    [("tis", ["path=mine.py"]), ("own", []), ("own", ["type=tis"])],
)
def test_a_user_s_tis_is_tis_bit_for_bit_in_a_resumed_run(
    runs: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: list[str]
):
    monkeypatch.chdir(runs)
    replay = Replay(runs / "runs" / name, [f"learner.objective.{text}" for text in settings])
    steps = list(replay.steps())
    assert [one.record.step for one in steps] == list(range(STEPS))
    for one in steps:
        assert one.metrics == one.record.metrics
    assert replay.unequal_tensors(STEPS) == []
    assert replay.what_if == bool(settings)


def test_a_checkpoint_that_differs_is_no_equal_replay(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its moments, say, where every step's weights are equal: it was printed, and the exit code was 0."""
    monkeypatch.setattr(Replay, "unequal_tensors", lambda self, step: ["optimizer: moment"])
    shutil.copytree(runs / "runs" / "tis", tmp_path / "tis")
    with pytest.raises(typer.Exit) as end:
        cli.main(tmp_path / "tis", STEPS - 2)
    assert end.value.exit_code == 1


def test_another_loss_is_tried_on_what_was_logged(runs: Path, tmp_path: Path):
    (tmp_path / "square.py").write_text(
        "def objective(x, beta=0.1):\n    r = x.log_ratio.exp()\n"
        "    return x.advantages * r - beta * (r - 1) ** 2\n"
    )
    path = f'learner.objective.path="{tmp_path / "square.py"}"'
    settings = ["--set", path, "--set", "learner.objective.settings.beta=2.0"]
    said = areal_q(runs, "replay", "runs/tis", *settings)
    said = " ".join(said.split())  # lines are wrapped by the length of the path
    assert "another history" in said and "step 0 is the first that differs" in said


def test_code_that_changed_is_refused_until_it_is_asked_for(runs: Path, tmp_path: Path):
    directory = shutil.copytree(runs / "runs" / "own", tmp_path / "own")
    file = Path(load(directory / "config.toml").learner.objective.path)  # pyright: ignore
    settings = {record.settings for record in iter_steps(directory / "steps")}
    assert len(settings) == 2, "one before the resumption, and one after it"
    file.write_text(OWN_TIS.replace("cap=2.0", "cap=1.5"))
    try:
        with pytest.raises(TaskError, match=r"mine\.py: .*began with; put it back, or .* --set"):
            Replay(directory)
        run = resumed(directory, [f"steps={2 * STEPS}"])
        with (
            pytest.raises(UserError, match=r"mine\.py: .*began with; put it back$"),
            claimed(run, True),
        ):
            pass
        assert Replay(directory, [f"learner.objective.path={file}"]).what_if
        (tmp_path / "mine.py").write_text(OWN_TIS)
        kept = Replay(directory, [f'learner.objective.path="{tmp_path / "mine.py"}"'])
        assert kept.exact and not kept.what_if
    finally:
        file.write_text(OWN_TIS)
    assert not Replay(directory).what_if
