"""Directories of engines: a dead worker's go with its shared memory, a living one's stay."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from helpers.commands import full_disk
from helpers.fixture_types import MakeRun
from helpers.policies import initial_model

from areal_q.errors import ConfigError
from learner.publishing.version_builder import VersionBuilder
from rollout.engines.process.checkpoint_backend import write_version
from rollout.engines.process.own_directory import SHARED_MEMORY, OwnDirectory

PREFIX = "areal-q-test-"
WORKER = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
from rollout.engines.process.own_directory import OwnDirectory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # it was killed as well
directory = OwnDirectory(sys.argv[1], sys.argv[2])
directory.note_segments([os.getpid()])
print(directory.path, segment.name, flush=True)
time.sleep(1000)
"""
pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path, Path]]]:
    """Starts a worker; returns it, its directory and its segment of shared memory."""
    started: list[tuple[subprocess.Popen[str], Path, Path]] = []

    def begin() -> tuple[subprocess.Popen[str], Path, Path]:
        command = [sys.executable, "-c", WORKER, PREFIX, str(tmp_path)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        directory, segment = worker.stdout.readline().split()
        started.append((worker, Path(directory), SHARED_MEMORY / segment))
        return started[-1]

    yield begin
    for worker, _, segment in started:
        worker.kill()
        worker.communicate()
        segment.unlink(missing_ok=True)


def test_a_start_removes_what_a_killed_worker_left(tmp_path: Path, start):
    (dead, directory, segment), (_, living, kept) = start(), start()
    dead.kill()
    dead.wait()
    assert directory.is_dir() and segment.exists()
    own = OwnDirectory(PREFIX, tmp_path)
    assert not directory.exists() and not segment.exists()
    assert living.is_dir() and kept.exists()
    own.close()
    assert [living] == list(tmp_path.iterdir())


CLOSES = """
import os, sys
from multiprocessing import shared_memory
from rollout.engines.process.own_directory import OwnDirectory
segment = shared_memory.SharedMemory(create=True, size=4096)
own = OwnDirectory("areal-q-test-", sys.argv[1])
own.note_segments([os.getpid()])
own.close()
print(os.path.exists(f"/dev/shm/{segment.name}"))
"""


def test_a_close_leaves_no_shared_memory_to_warn_of(tmp_path: Path):
    """Of the engine's processes, which are killed at the end and so cannot remove theirs."""
    command = [sys.executable, "-c", CLOSES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_segment_that_another_made_since_is_kept(tmp_path: Path):
    segment = shared_memory.SharedMemory(create=True, size=16)
    try:
        dead = tmp_path / f"{PREFIX}x"
        dead.mkdir()
        (dead / "segments").write_text(f"{segment.name} 1\n../etc/x 2\n")
        OwnDirectory(PREFIX, tmp_path).close()
        assert not dead.exists() and (SHARED_MEMORY / segment.name).exists()
    finally:
        segment.close()
        segment.unlink()


def test_a_full_disk_is_said_with_the_place(make_run: MakeRun, tmp_path: Path):
    """/dev/shm has 64 MiB in a container: a worker ended with a traceback that named no setting."""
    run = make_run("rollout.format=bf16")
    version = VersionBuilder(run).build(initial_model(run), 0)
    with full_disk(1000), pytest.raises(ConfigError, match=f"{tmp_path}: the weights cannot be"):
        write_version(version, tmp_path)
