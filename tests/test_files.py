"""Files that are whole or absent, whatever kills their writer."""

import fcntl
from pathlib import Path

import pytest

from areal_q.system.files import clear_leftovers, replacing, try_lock


@pytest.mark.parametrize("name", ["report.html", "step[1]*.json"])
def test_a_file_is_replaced_only_when_it_is_written(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as scratch:
        scratch.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    with replacing(path) as scratch:
        scratch.write_text("new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path):
    path = tmp_path / "model"
    for content in ("one", "two"):
        with replacing(path) as scratch:
            scratch.mkdir()
            (scratch / content).touch()
    assert [file.name for file in path.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_that_stepped_aside_is_put_back(tmp_path: Path):
    (tmp_path / ".old-model").mkdir()
    (tmp_path / ".tmp-model").mkdir()
    (tmp_path / ".tmp-other").touch()
    clear_leftovers(tmp_path, "model")
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".tmp-other"}


def test_no_lock_is_of_a_directory_that_lost_its_name(tmp_path: Path, monkeypatch):
    """Two starts of a run could each hold a lock, one of them that of the directory moved aside."""
    directory, flock = tmp_path / "run", fcntl.flock
    directory.mkdir()

    def renamed_before(handle: int, operation: int) -> None:
        directory.rename(tmp_path / "run.1")
        directory.mkdir()
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", renamed_before)
    assert try_lock(directory) is None
