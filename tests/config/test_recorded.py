"""Settings of runs that were made by an earlier version: read with a warning where today's would be refused."""

import logging
from pathlib import Path

import pytest

from areal_q.config import dump_toml, load, override
from areal_q.errors import ConfigError
from areal_q.system.run_dir import claimed, resumed

IDLE = '[rollout]\nformat = "bf16"\nsticky_scales = 0.1\n[buffer]\nclaim_timeout_s = 2.0\n'
"""A setting that does nothing, and one below its least value of today"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(IDLE)
    return path


def test_a_rule_that_a_recorded_run_breaks_is_a_warning(recorded: Path, caplog):
    with pytest.raises(ConfigError, match="sticky_scales"):
        load(recorded)

    with caplog.at_level(logging.WARNING):
        run = load(recorded, ["steps=7"], recorded=True)

    assert (run.steps, run.rollout.sticky_scales, run.buffer.claim_timeout_s) == (7, 0.1, 2.0)
    assert "sticky_scales" in caplog.text and "claim_timeout_s" in caplog.text


def test_a_setting_that_went_is_left_out_of_a_recorded_run(tmp_path: Path, caplog):
    path = tmp_path / "config.toml"
    path.write_text("steps = 9\ncolour = 1\n[learner.objective]\ntype = 'acr'\ntaste = 'sweet'\n")
    with pytest.raises(ConfigError, match="no such setting"):
        load(path)

    with caplog.at_level(logging.WARNING):
        run = load(path, recorded=True)

    assert run.steps == 9
    assert "colour" in caplog.text and "learner.objective.taste" in caplog.text


def test_a_number_of_a_recorded_run_is_moved_within_its_bound(tmp_path: Path, caplog):
    path = tmp_path / "config.toml"
    path.write_text(
        "steps = 0\n[learner]\nmax_lag = 5000\n[learner.optimizer]\nbetas = [0.9, 1.5]\n"
        "[rollout.sampling]\ntop_p = 1.5\n"
    )
    with pytest.raises(ConfigError, match="at least 1"):
        load(path)

    with caplog.at_level(logging.WARNING):
        run = load(path, recorded=True)

    assert (run.steps, run.learner.max_lag, run.rollout.sampling.top_p) == (1, 1000, 1.0)
    assert run.learner.optimizer.betas[0] == 0.9 and 0.999 < run.learner.optimizer.betas[1] < 1
    assert f"{path}: learner.max_lag = 5000: taken as 1000" in caplog.text
    with pytest.raises(ConfigError, match=r"on the command line: learner\.max_lag"):
        load(path, ["learner.max_lag=5000"], recorded=True)


def test_a_run_with_a_number_beyond_its_bound_resumes(tmp_path: Path):
    (tmp_path / "old" / "checkpoints" / "step-000003").mkdir(parents=True)
    (tmp_path / "old" / "config.toml").write_text("[learner]\nmax_lag = 5000\n")
    again = resumed(tmp_path / "old", ["steps=7"])
    assert (again.steps, again.learner.max_lag) == (7, 1000)
    with claimed(again, resume=True):
        assert load(tmp_path / "old" / "config.toml").learner.max_lag == 1000


def test_an_override_of_a_recorded_run_is_checked(recorded: Path):
    run = load(recorded, recorded=True)
    assert override(run, "steps=7").rollout.sticky_scales == 0.1
    for change in ("rollout.sampling.temperature=0", "learner.max_lagg=1"):
        with pytest.raises(ConfigError, match="on the command line"):
            load(recorded, [change], recorded=True)
        with pytest.raises(ConfigError, match="on the command line"):
            override(run, change)


def test_the_settings_of_a_recorded_run_are_written_as_they_were(recorded: Path):
    run = load(recorded, recorded=True)
    recorded.write_text(dump_toml(run))
    assert load(recorded, recorded=True) == run
