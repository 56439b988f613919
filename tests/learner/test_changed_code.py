"""A run that goes on with other code says so by the name of its file."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_q.config import load
from areal_q.system.run_dir import with_digests
from learner.build import _changed_settings


def test_other_code_is_noted_by_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(response):\n    return 1.0\n")
    before = with_digests(load(None, [f"reward.path={file}"]))
    file.write_text("def reward(response):\n    return 0.0\n")
    logged = [SimpleNamespace(settings="")]
    monkeypatch.setattr("learner.build.iter_steps", lambda *_: logged)
    monkeypatch.setattr("learner.build.run_dir.settings_of", lambda *_: before)
    said = _changed_settings(with_digests(before), tmp_path, 7)
    assert said == f"from step 7 on: {file} is not what it was"
