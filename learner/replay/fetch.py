"""`areal-q fetch RUN --from A --to B` writes what a replay of these steps needs as a tar stream to stdout.

    docker compose exec -T learner areal-q fetch /runs/NAME --from 840 --to 845 | tar x
    kubectl exec learner-0 -- areal-q fetch /runs/NAME --from 840 --to 845 | tar x

The stream contains the directory NAME with settings, metrics, the processes' logs, the newest checkpoint at or
before A, and the files of the step logs from there to B. The run may be in progress.

Exit codes: 0 written; 2 no such run, checkpoint or step, which one line names.
"""

import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from areal_q.errors import ConfigError, LogError
from areal_q.system.command import RunDirectory, StopBefore
from areal_q.system.files import by_number
from areal_q.system.run_dir import METRICS_FILE, SETTINGS_DIR, STOPS_FILE, checkpoint_at

SMALL = ("config.toml", "run-id", STOPS_FILE, "problems-digest", METRICS_FILE)
LOGS = ("trajectories", "steps", "tokens")
EXITS = "Exit codes: 0 written; 2 no such run, checkpoint or step, which one line names."


def main(
    directory: RunDirectory,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, help="first step to replay; default: of the first checkpoint"
        ),
    ] = None,
    stop: StopBefore = None,
) -> None:
    """Writes a tar stream with what `areal-q replay` needs of some steps of RUN: pipe it into `tar x`."""
    if sys.stdout.isatty():
        raise ConfigError("standard output is a terminal: pipe it, as in areal-q fetch RUN | tar x")
    fetch(directory, first, stop, sys.stdout.buffer)


def fetch(directory: Path, first: int | None, stop: int | None, out: BinaryIO) -> None:
    """Writes the tar stream to `out`. Raises LogError if there is no such run or step, CheckpointError if there
    is no checkpoint at or before `first`."""
    if not (directory / "config.toml").is_file():
        raise LogError(f"{directory}: no such run")
    directory = directory.resolve()
    with ExitStack() as files:
        found = checkpoint_at(directory, first)
        # The files are opened first, so that they stay readable if a learner removes the checkpoint meanwhile.
        held = [files.enter_context(path.open("rb")) for path in sorted(found.iterdir())]
        begins = int(found.name.removeprefix("step-"))
        parts = list(_parts(directory, begins, stop))
        _check_logged(directory, begins if first is None else first)
        small = [path for name in SMALL if (path := directory / name).exists()]
        settings = sorted(directory.glob(f"{SETTINGS_DIR}/*.toml"))
        logs = sorted(directory.glob("logs/*.log"))
        with tarfile.open(fileobj=out, mode="w|") as tar:
            for file in held:
                _add(tar, directory, file)
            for path in (*small, *settings, *logs, *parts):
                with path.open("rb") as file:
                    _add(tar, directory, file)


def _add(tar: tarfile.TarFile, directory: Path, file: BinaryIO) -> None:
    name = Path(file.name).relative_to(directory.parent)
    member = tar.gettarinfo(arcname=str(name), fileobj=file)
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    tar.addfile(member, file)


def _check_logged(directory: Path, step: int) -> None:
    """Raises LogError unless the log reaches `step`; of a run in progress, the last minute is not readable
    yet."""
    from buffer.logs.parquet_log import steps_of

    parts = by_number((directory / "steps").glob("part-*.parquet"))
    newest = steps_of(parts[-1])[1] if parts else -1
    if newest < step:
        end = f"the log ends at step {newest}" if parts else "nothing is logged"
        raise LogError(f"{directory / 'steps'}: no record of step {step}: {end}")


def _parts(directory: Path, first: int, stop: int | None) -> Iterator[Path]:
    """Yields the files of the logs that contain a step from `first` to before `stop`."""
    from buffer.logs.parquet_log import steps_of

    for log in LOGS:
        for path in by_number((directory / log).glob("part-*.parquet")):
            oldest, newest = steps_of(path)
            if newest >= first and (stop is None or oldest < stop):
                yield path
