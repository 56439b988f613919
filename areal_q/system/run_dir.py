"""The directory of a run: never overwritten, used by one launcher at a time.

runs/NAME/
    config.toml       the settings in force
    run-id            tells this run from others of its name, wherever it goes on
    problems-digest   tells whether the file of problems is still that of the start
    metrics.jsonl     one record per event (areal_q/observability/metrics_log.py); tensorboard/ holds the same
    logs/             what each process said
    checkpoints/      to resume from
    trajectories/     every consumed group
    steps/            every learner step
    tokens/           what the learner computed for each token of them
    redis/            the buffer's data, when the launcher started Redis itself
    hf/               the model at the end, as transformers loads it
    curves.png
    report.html       made by `areal-q report`
"""

import fcntl
import itertools
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import Run, dump_toml, load, override
from areal_q.errors import CheckpointError, ConfigError
from areal_q.system.files import replacing

METRICS_FILE, RUN_ID_FILE = "metrics.jsonl", "run-id"
OF_A_START = {
    *(
        "config.toml",
        RUN_ID_FILE,
        "problems-digest",
        METRICS_FILE,
        "tensorboard",
        "logs",
        "checkpoints",
    ),
    *("trajectories", "steps", "tokens", "redis"),
}
"""What a start may leave that fails before its first checkpoint"""
MAY_CHANGE_ON_RESUME = (
    "steps",
    "eval.",
    "checkpoint.",
    "buffer.",
    "broadcast.",
    "rollout.workers",
    "rollout.threads",
    "rollout.serve",
    "learner.fidelity.",
    "learner.threads",
    "learner.microbatch_tokens",  # the same, but for the order of sums
    "learner.backend.",  # the same loss and weights, within tolerances
)
"""Settings (or their beginnings) that leave what was learnt so far valid."""


def path_of(run: Run) -> Path:
    return Path(run.root) / run.name


def with_absolute_files(run: Run) -> Run:
    """Returns `run` with its task, reward and model named from the root, so that it can be evaluated and
    resumed from any directory. What is no file here, such as the id of a data set, stays as it is."""
    parts = {
        name: msgspec.structs.replace(part, path=str(Path(path).resolve()))
        for name in ("task", "reward", "model")
        if (path := getattr(part := getattr(run, name), "path", None)) and Path(path).exists()
    }
    return msgspec.structs.replace(run, **parts)


@contextmanager
def claimed(run: Run, resume: bool) -> Iterator[tuple[Path, Path | None]]:
    """(the run's directory with config.toml in it, where an earlier run of that name went).

    An earlier start that failed before it learnt anything is no run: its directory is taken over.
    Held against other launchers by a lock that goes with this process, however it ends.
    Raises ConfigError where a run is going on in it, or it cannot be written.
    """
    directory, moved = path_of(run), None
    try:
        if directory.exists() and not resume:
            os.close(_lock(directory))
            if learnt_nothing(directory):
                _clear_start(directory)
            else:
                moved = _move_aside(directory)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        handle = _lock(directory)
        settings = dump_toml(with_absolute_files(run))
        (directory / "config.toml").write_text(settings, "utf-8")
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from error
    try:
        yield directory, moved
    finally:
        os.close(handle)


def resumed(directory: Path, overrides: list[str]) -> Run:
    """Returns the settings saved in `directory`, with `overrides` on top.

    Raises CheckpointError where there is nothing to resume, ConfigError for an override that would
    change what is being learnt.
    """
    if not (directory / "config.toml").is_file():
        raise CheckpointError(f"{directory}: no such run to resume")
    if not has_checkpoint(directory):
        raise CheckpointError(f"{directory}: no checkpoint to resume from; start the run afresh")
    # A directory that was renamed is the name of its run from now on.
    place = [f'name="{directory.name}"', f'root="{directory.parent}"']
    saved = load(directory / "config.toml", place, recorded=True)
    again = override(saved, *overrides)
    _check_unchanged(saved, again)
    if (step := _newest_step(directory)) > again.steps:
        raise ConfigError(
            f"steps = {again.steps}: {directory} is at step {step} already; to go on, ask for more, such as "
            f"steps={2 * step}"
        )
    return again


def resumes(run: Run) -> bool:
    """Returns True if `run` goes on from a checkpoint in its directory: so a service that restarts finds its
    way.

    Raises ConfigError where it would go on with settings that change what is being learnt.
    """
    directory = path_of(run)
    if not has_checkpoint(directory):
        return False
    place = [f'name="{run.name}"', f'root="{run.root}"']
    _check_unchanged(load(directory / "config.toml", place, recorded=True), run)
    return True


def _check_unchanged(saved: Run, again: Run) -> None:
    changed = differences(with_absolute_files(saved), with_absolute_files(again))
    refused = [key for key in changed if not key.startswith(MAY_CHANGE_ON_RESUME)]
    # Another choice brings other settings with it: the choice is what was asked for.
    choices = [key for key in refused if key.endswith(".type")]
    for key in choices or refused:
        may = ", ".join(name + "*" * name.endswith(".") for name in MAY_CHANGE_ON_RESUME)
        raise ConfigError(f"{key}: cannot change when a run resumes; these can: {may}")


def has_checkpoint(directory: Path) -> bool:
    """Complete, or set aside while one of the same step is being written: a learner restores both."""
    found = directory / "checkpoints"
    return any(path.is_dir() for kind in ("step-*", ".old-*") for path in found.glob(kind))


def _newest_step(directory: Path) -> int:
    """Returns the step of the newest checkpoint; 0 where there is none."""
    names = (path.name.partition("-")[2] for path in (directory / "checkpoints").glob("step-*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def learnt_nothing(directory: Path) -> bool:
    """Returns True for the directory of a run that has no checkpoint, no logged step and no foreign file."""
    if has_checkpoint(directory) or not {path.name for path in directory.iterdir()} <= OF_A_START:
        return False
    metrics = directory / METRICS_FILE
    logs = ("trajectories", "steps")
    logged = any(True for log in logs for _ in directory.glob(f"{log}/part-*.parquet"))
    return not logged and not (metrics.exists() and b'"kind":"step"' in metrics.read_bytes())


def _clear_start(directory: Path) -> None:
    """Removes what an earlier start wrote of its settings and problems, which may be others now. What its
    processes said stays, and so does its id: a learner that comes back need not wait for its own lease."""
    for path in directory.iterdir():
        if path.name not in ("logs", RUN_ID_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def given_up(directory: Path, moved: Path | None) -> bool:
    """Undoes `claimed` for a start that failed before its first checkpoint; False where there is one."""
    if has_checkpoint(directory):
        return False
    shutil.rmtree(directory)
    if moved:
        moved.rename(directory)
    return True


def run_id(directory: Path, before: str = "") -> str:
    """Returns the id of the run in `directory`, made at the first call; `before` is the one to take up again
    where the file is gone."""
    path = directory / RUN_ID_FILE
    if not path.exists():
        with replacing(path) as scratch:
            scratch.write_text(f"{before or uuid.uuid4().hex}\n")
    return path.read_text().strip()


def newest(root: Path) -> Path:
    """Returns the run under `root` that was last active. Raises CheckpointError if there is none."""
    runs = [path.parent for path in root.glob("*/config.toml")]
    if not runs:
        raise CheckpointError(f"{root}: no run to resume")
    return max(runs, key=_last_written)


def differences(one: Run, other: Run) -> list[str]:
    """Dotted paths of the settings in which two runs differ, sorted."""
    a, b = flat(msgspec.to_builtins(one)), flat(msgspec.to_builtins(other))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Example: {"a": {"b": 1}} → {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def _last_written(directory: Path) -> float:
    metrics = directory / METRICS_FILE
    return (metrics if metrics.exists() else directory / "config.toml").stat().st_mtime


def _move_aside(directory: Path) -> Path:
    """runs/demo becomes runs/demo.1, or the next number that is free."""
    numbered = (directory.with_name(f"{directory.name}.{n}") for n in itertools.count(1))
    free = next(path for path in numbered if not path.exists())
    directory.rename(free)
    return free


def try_lock(directory: Path) -> int | None:
    """Returns a descriptor that holds `directory` until it is closed; None if another holds it, or it went.

    Raises OSError if it cannot be opened.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if directory.exists():
            return handle
    except BlockingIOError:
        pass
    os.close(handle)
    return None


def _lock(directory: Path) -> int:
    handle = try_lock(directory)
    if handle is None:
        raise ConfigError(f"{directory}: a run is going on there; choose another --name")
    return handle
