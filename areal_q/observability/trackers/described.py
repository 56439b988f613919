"""What a tracker is told of a run before its first record, and what it reads out of a record."""

import shutil
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import Run, TrackerConfig
from areal_q.observability.metrics_log import Record
from areal_q.system.files import write_whole
from areal_q.system.run_dir import COMMIT_FILE, TRACKERS_DIR

GIT_S = 5.0
"""Seconds that git may take to say a commit; a large tree on a slow disk takes longer, and has none."""
SAMPLE = ("prompt", "answer", "response", "correct")
"""What each held-out sample of an evaluation has."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker gets to know it."""

    name: str
    """The run's name, or the one that the tracker's settings give it"""
    id: str
    """Distinguishes it from all others; the same whenever the tracker goes on with it"""
    directory: Path
    """All that the run writes"""
    scratch: Path
    """A directory for files of the tracker's own"""
    settings: dict[str, Any]
    """All settings, as tables"""
    about: dict[str, str]
    """The version of AReaL-Q, and the commit where there was one"""


def describe(
    run: Run, directory: Path, label: str, tracker: TrackerConfig, version: str
) -> TrackedRun:
    """Returns what the tracker `label` is told by this `version` of AReaL-Q. The first call chooses its id, and
    makes its directory."""
    scratch = scratch_of(directory, label)
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / "id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex)  # a full disk would leave one that is empty
    kept = directory / COMMIT_FILE
    commit = {"commit": kept.read_text().strip()} if kept.exists() else {}
    return TrackedRun(
        name=getattr(tracker, "name", None) or run.name,
        id=file.read_text(),
        directory=directory.resolve(),
        scratch=scratch.resolve(),
        settings=msgspec.to_builtins(run),
        about={"areal_q": version} | commit,
    )


def scratch_of(directory: Path, label: str) -> Path:
    return directory / TRACKERS_DIR / label


def keep_commit(directory: Path) -> None:
    """Writes the commit of the current directory into that of a run, with "+changes" where files differ from
    it; nothing where there is no git, or no repository."""
    git = shutil.which("git")
    command = [str(git), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    try:
        said = (
            subprocess.run(command, capture_output=True, text=True, timeout=GIT_S) if git else None
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if said and said.returncode == 0:
        (directory / COMMIT_FILE).write_text(said.stdout)


def numbers(record: Record) -> dict[str, Any]:
    """Returns the metrics of a record of a step or of an evaluation, and its seconds; nothing of others, which
    have no place on the axis of steps."""
    if record["kind"] not in ("step", "eval"):
        return {}
    found = {k: v for k, v in record.items() if "/" in k and isinstance(v, int | float)}
    return found | {"elapsed_s": record["elapsed_s"]}


def samples(record: Record) -> list[list[Any]]:
    """Returns the held-out samples of an evaluation, a row of SAMPLE each."""
    return [[sample.get(name) for name in SAMPLE] for sample in record.get("samples", [])]
