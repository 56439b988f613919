"""The directory of a run, which is never overwritten and is used by one launcher at a time.

runs/NAME/
    config.toml       the settings in force
    settings/         all that ever were, each under the hash by which steps/ names it
    run-id            distinguishes this run from others of the same name, on any machine
    stops.json        the ids that end a response, and what says so (areal_q/tasks/stops.py)
    problems-digest   hashes of the problems and of what encodes them, by which a resumed run notices others
    commit            of the directory in which the run was launched (observability/trackers/described.py)
    metrics.jsonl     one record per event (areal_q/observability/metrics_log.py); tensorboard/ holds the same
    trackers/         what each tracker was given, and what it keeps on this disk
    logs/             one log per process
    checkpoints/      for resuming and replaying
    trajectories/     every group that was learnt from
    steps/            every learner step
    tokens/           what the learner computed for each of their tokens
    redis/            the buffer's data, if the launcher started Redis itself
    hf/               the model at the end, as transformers loads it
    report.html       made by `areal-q report`
"""

import itertools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from areal_q.config import (
    Mix,
    PythonTracker,
    Run,
    as_before,
    dump_toml,
    load,
    override,
    settings_hash,
)
from areal_q.config.load import Override
from areal_q.config.objectives import parts_of
from areal_q.config.tasks import chat_of
from areal_q.errors import CheckpointError, ConfigError, LogError, TaskError, os_errors_as
from areal_q.plugins import absolute, digest_of
from areal_q.system.files import SCRATCH, try_lock, write_whole

METRICS_FILE, RUN_ID_FILE, STOPS_FILE = "metrics.jsonl", "run-id", "stops.json"
SETTINGS_DIR, TRACKERS_DIR, COMMIT_FILE = "settings", "trackers", "commit"
OF_A_START = {
    *("config.toml", SETTINGS_DIR, RUN_ID_FILE, STOPS_FILE, "problems-digest", COMMIT_FILE),
    *(TRACKERS_DIR, METRICS_FILE, "tensorboard", "logs", "checkpoints"),
    *("trajectories", "steps", "tokens", "redis"),
}
"""Names of all that a start which fails before its first checkpoint may leave."""
LEARNERS_CODE = ("learner.objective", "learner.advantage")
"""Tables of settings whose own code a replay runs again."""
FIXED_CODE = (*LEARNERS_CODE, "learner.order")
"""Tables of settings whose own code stays what it was as the run began."""
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
    "learner.processes",
    "learner.threads",
    "learner.microbatch_tokens",  # changes the order of sums only
    "learner.backend.",  # gives the same loss and weights within tolerances
    "trackers",
    # Where the teacher is reached; the log has what it said.
    "learner.teacher.url",
    "learner.teacher.model",
    "learner.teacher.connections",
    "learner.teacher.timeout_s",
    "learner.teacher.retries",
    # From here on: how the run goes on learning. settings/ has each step's, for replays.
    "learner.max_lag",
    "learner.oversampling",
    "learner.max_grad_norm",
    "learner.optimizer.lr",
    "learner.optimizer.warmup_steps",
    "learner.optimizer.decay_steps",
    "learner.optimizer.decay",
    "learner.optimizer.final",
    "learner.objective.clip_low",
    "learner.objective.clip_high",
    "learner.objective.negative_clip_low",
    "learner.objective.negative_clip_high",
    "reward.timeout_s",
    "reward.retries",
    "reward.retry_pause_s",
    "reward.processes",
    "reward.memory_mib",
    "reward.path",  # of a script, whose name has its hash
    "reward.digest",
    "reward.settings.",
    "task.digest",
    "rollout.environment.digest",
    "rollout.environment.timeout_s",
    "rollout.environment.processes",
    "rollout.environment.memory_mib",
)
"""Settings, or prefixes of settings, that may change because what was learnt so far stays valid."""
_MIXED_DIGEST = re.compile(r"task\.sources\.[^.]+\.(task|reward)\.digest")
"""What `task.digest` and `reward.digest` are of a mixture."""


def path_of(run: Run) -> Path:
    return Path(run.root) / run.name


def with_absolute_files(run: Run) -> Run:
    """Returns `run` with absolute paths of its models, data, chat template, keys and own code, so that it can
    be evaluated and resumed from any directory. A path that is no file here, such as the id of a data set,
    stays as it is."""
    sets = [f"eval.sets.{name}" for name in run.eval.sets]
    others = ("sft", "learner.teacher", "learner.reference_kl")
    for name in ("model", *code_tables(run, own_code(run)), *others, *sets):
        if path := getattr(table_at(run, name), "path", None):
            run = with_changes(run, name, path=absolute(path))
    for name in (*run.tasks, "sft"):
        table = table_at(run, name)
        if isinstance(heldout := getattr(table, "heldout", None), str):
            run = with_changes(run, name, heldout=absolute(heldout))
        if (chat := chat_of(table)) and chat.template_file:
            run = with_changes(run, f"{name}.chat", template_file=absolute(chat.template_file))
    if run.broadcast.keys:
        run = with_changes(run, "broadcast", keys=absolute(run.broadcast.keys))
    return _own_trackers(run, "path", absolute)


def own_code(run: Run) -> list[str]:
    """Returns the dotted names of all tables of `run` that may name code of the user's own."""
    mixed = run.task.sources.items() if isinstance(run.task, Mix) else ()
    rewards = [f"task.sources.{name}.reward" for name, source in mixed if source.reward]
    others = ("buffer.sampler", "rollout.environment", "trackers")
    return [*FIXED_CODE, *others, *run.tasks, "reward", *rewards]


def code_tables(run: Run, names: Iterable[str]) -> list[str]:
    """Returns `names` with the advantages of single sources in place of a table that has several."""
    parts = parts_of(run.learner.advantage)
    own = [f"learner.advantage.{part}".rstrip(".") for part in parts]
    return [table for n in names for table in (own if n == "learner.advantage" else [n])]


def with_digests(run: Run, names: Sequence[str] | None = None, replayed: bool = False) -> Run:
    """Returns `run` with the digests of the user's own code at `names`, by default all of it. Raises TaskError
    for a file that is missing or, of FIXED_CODE, not the one that the run began with; where it is `replayed`
    another one may be asked for."""
    names = own_code(run) if names is None else names
    for name in code_tables(run, names):
        part = table_at(run, name)
        if not getattr(part, "path", None) or not hasattr(part, "digest"):
            continue
        digest = digest_of(part.path)
        if name.startswith(FIXED_CODE) and part.digest not in ("", digest):
            other = f", or ask for another: --set {name}.path=FILE" if replayed else ""
            raise TaskError(
                f"{part.path}: it, or what it imports from beside it, is not what the run began with; put it "
                f"back{other}"
            )
        run = with_changes(run, name, digest=digest)
    return _own_trackers(run, "digest", digest_of) if "trackers" in names else run


def _own_trackers(run: Run, key: str, of: Callable[[str], str]) -> Run:
    """Returns `run` with what `of` makes of their paths as `key` of the trackers of the user's own."""
    trackers = (
        with_changes(one, "", **{key: of(one.path)}) if isinstance(one, PythonTracker) else one
        for one in run.trackers
    )
    return with_changes(run, "", trackers=tuple(trackers))


def table_at(settings: Any, name: str) -> Any:
    """Returns the table of that dotted name."""
    for part in name.split("."):
        settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    return settings


def with_changes(settings: Any, name: str, **changes: Any) -> Any:
    """Returns `settings` with changes to the table of that dotted name."""
    first, _, rest = name.partition(".")
    if first:
        changes = {first: with_changes(table_at(settings, first), rest, **changes)}
    if isinstance(settings, dict):
        return settings | changes
    return msgspec.structs.replace(settings, **changes)


def _dated(run: Run, before: Run | None) -> Run:
    """Returns `run` with the date of its chat templates, where its settings name none: that of `before`, the
    run that it goes on with, else today's."""
    for name in (*run.tasks, "sft"):
        if (chat := chat_of(table_at(run, name))) and not chat.date:
            known = chat_of(before.sft if name == "sft" else before.task) if before else None
            today = (known and known.date) or str(date.today())
            run = with_changes(run, f"{name}.chat", date=today)
    return run


@contextmanager
def claimed(run: Run, resume: bool, step: int | None = None) -> Iterator[tuple[Path, Path | None]]:
    """Yields (the run's directory with config.toml in it, the path to which an earlier run of the same name was
    moved, or None). The directory is locked against other launchers until the block or this process ends.

    If an earlier start failed before it learnt anything, its directory is used again and not moved. Checkpoints
    after `step` are set aside, so that a resumed run goes on from there.
    Raises ConfigError if a run is in progress there, or the directory cannot be written, and TaskError as
    `with_digests` does.
    """
    run = with_digests(with_absolute_files(run))
    directory, moved = path_of(run), None
    with os_errors_as(ConfigError, directory):
        if directory.exists() and not resume:
            earlier = _lock(directory)  # no other start may claim it before it is moved
            try:
                if learnt_nothing(directory):
                    _clear_start(directory)
                else:
                    numbered = (directory.with_name(f"{run.name}.{n}") for n in itertools.count(1))
                    moved = directory.rename(next(path for path in numbered if not path.exists()))
            finally:
                os.close(earlier)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        handle = _lock(directory)
        if step is not None:
            _go_back(directory, step)
        file = directory / "config.toml"
        before = load(file) if resume else None
        write_whole(file, dump_toml(_dated(run, before)))
    try:
        yield directory, moved
    finally:
        os.close(handle)


def resumed(directory: Path, overrides: list[str], step: int | None = None) -> Run:
    """Returns the settings saved in `directory`, changed by `overrides`, to go on from the checkpoint of
    `step`, or from the newest.

    Raises CheckpointError if there is nothing to resume, ConfigError if an override changes what is learnt.
    """
    if not (directory / "config.toml").is_file():
        raise CheckpointError(f"{directory}: no such run to resume")
    if not has_checkpoint(directory):
        raise CheckpointError(f"{directory}: no checkpoint to resume from; start the run afresh")
    found = checkpoints_of(directory)
    if step is not None and step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{directory}: no checkpoint of step {step}; there are: {there}")
    # A directory may have been renamed or moved; its run takes the new name and root.
    place = [f'name="{directory.name}"', f'root="{directory.parent}"']
    saved = load(directory / "config.toml", place)
    again = as_before(override(saved, *overrides), saved)
    _check_unchanged(saved, again)
    check_goes_on(directory, again.steps, step)
    return again


def check_goes_on(directory: Path, steps: int, step: int | None = None) -> None:
    """Raises ConfigError if the run in `directory`, or its checkpoint of `step`, is beyond so many steps."""
    at = max(checkpoints_of(directory), default=0) if step is None else step
    if at > steps:
        raise ConfigError(
            f"steps = {steps}: {directory} is at step {at} already; to go on, ask for more, such as "
            f"steps={2 * at}"
        )


def checkpoints_of(directory: Path) -> dict[int, Path]:
    """Returns the checkpoints of the run in `directory` by their steps."""
    found = (directory / "checkpoints").glob("step-*")
    return {int(n): path for path in sorted(found) if (n := path.name.partition("-")[2]).isdigit()}


def checkpoint_at(directory: Path, step: int | None) -> Path:
    """Returns the last checkpoint of the run in `directory` at or before `step`, or the first one if that is
    None. Raises CheckpointError if there is none."""
    found = checkpoints_of(directory)
    before = [at for at in found if step is None or at <= step]
    if not before:
        at = f" at or before step {step}; the first stands at step {min(found)}" if found else ""
        raise CheckpointError(f"{directory / 'checkpoints'}: no checkpoint{at}")
    return found[min(before) if step is None else max(before)]


def _go_back(directory: Path, step: int) -> None:
    for later in (path for at, path in checkpoints_of(directory).items() if at > step):
        aside = later.with_name(f"later-{later.name}")
        shutil.rmtree(aside, ignore_errors=True)
        later.rename(aside)


def resumes(run: Run, fetched: Callable[[Run], Run] = lambda run: run) -> Run | None:
    """Returns the settings with which a restarted service resumes: `run`, with what its directory has recorded
    in place of `auto`, as `fetched` returns it. Returns None if there is no checkpoint.

    Raises ConfigError if its settings would change what is being learnt.
    """
    directory = path_of(run)
    if not has_checkpoint(directory):
        return None
    place = [f'name="{run.name}"', f'root="{run.root}"']
    saved = load(directory / "config.toml", place)
    again = fetched(as_before(run, saved))
    _check_unchanged(saved, again)
    return again


def keep_settings(directory: Path, run: Run) -> None:
    """Writes the settings of the steps that follow to where `settings_of` finds them, even after a resumption
    with others."""
    path = directory / SETTINGS_DIR / f"{settings_hash(run)}.toml"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_whole(path, dump_toml(run))


def recorded_settings(directory: Path) -> Run:
    """Returns the settings of the run in `directory`. Raises LogError if there is no run."""
    if not (directory / "config.toml").is_file():
        raise LogError(f"{directory}: no such run")
    return load(directory / "config.toml")


def settings_of(directory: Path, step_settings: str) -> Run:
    """Returns the settings with the hash `step_settings`, as the step log names them."""
    return load(directory / SETTINGS_DIR / f"{step_settings}.toml")


def _check_unchanged(saved: Run, again: Run) -> None:
    saved, again = with_absolute_files(saved), with_absolute_files(_dated(again, saved))
    changed = differences(saved, again)
    refused = [
        key
        for key in changed
        if not key.startswith(MAY_CHANGE_ON_RESUME) and not _MIXED_DIGEST.fullmatch(key)
    ]
    # Another choice of a type changes the settings below it, too; only the choice is worth a message.
    choices = [key for key in refused if key.endswith(".type")]
    for key in choices or refused:
        may = ", ".join(name + "*" * name.endswith(".") for name in MAY_CHANGE_ON_RESUME)
        raise ConfigError(f"{key}: cannot change when a run resumes; these can: {may}")


def has_checkpoint(directory: Path) -> bool:
    """Returns True if there is a checkpoint: a complete one, or one that was being replaced by another of the
    same step when its learner was killed, and that the next learner restores."""
    found = directory / "checkpoints"
    return any(path.is_dir() for kind in ("step-*", ".old-*") for path in found.glob(kind))


def learnt_nothing(directory: Path) -> bool:
    """Returns True if a run's directory has no checkpoint, no logged step and no file of other origin."""
    names = {name for name in os.listdir(directory) if not name.startswith(SCRATCH)}
    if has_checkpoint(directory) or not names <= OF_A_START:
        return False
    metrics = directory / METRICS_FILE
    logs = ("trajectories", "steps")
    logged = any(True for log in logs for _ in directory.glob(f"{log}/part-*.parquet"))
    return not logged and not (metrics.exists() and b'"kind":"step"' in metrics.read_bytes())


def _clear_start(directory: Path) -> None:
    """Removes what an earlier start left, as settings and problems may be others now. Its logs stay, and so
    does its id, so that a learner need not wait for its own lease to expire."""
    for path in directory.iterdir():
        if path.name not in ("logs", RUN_ID_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def given_up(directory: Path, moved: Path | None) -> bool:
    """Undoes `claimed` for a start that failed: removes `directory` and moves the earlier run back from
    `moved`. Returns False, and changes nothing, if something was learnt."""
    if not learnt_nothing(directory):
        return False
    shutil.rmtree(directory)
    if moved:
        moved.rename(directory)
    return True


def run_id(directory: Path, before: str = "") -> str:
    """Returns the id of the run in `directory`, which the first call creates. If the file is missing, the id is
    `before`, or a new one if that is empty."""
    path = directory / RUN_ID_FILE
    if not path.exists():
        write_whole(path, f"{before or uuid.uuid4().hex}\n")
    return path.read_text().strip()


def newest(root: Path) -> Path:
    """Returns the directory of the last active run under `root`. Raises CheckpointError if there is none."""
    runs = [path.parent for path in root.glob("*/config.toml")]
    if not runs:
        raise CheckpointError(f"{root}: no run to resume")
    return max(runs, key=_last_written)


def differences(one: Run, other: Run) -> list[str]:
    """Returns the dotted names of the settings in which two runs differ, sorted."""
    a, b = flat(msgspec.to_builtins(one)), flat(msgspec.to_builtins(other))
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as one table of dotted keys. Example: {"a": {"b": 1}} → {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def as_pairs(settings: Mapping[str, Any] | None) -> list[Override]:
    """Returns settings by their dotted names, tables among them too, as `load` takes them."""
    return [*flat(dict(settings or {})).items()]


def _last_written(directory: Path) -> float:
    metrics = directory / METRICS_FILE
    return (metrics if metrics.exists() else directory / "config.toml").stat().st_mtime


def _lock(directory: Path) -> int:
    handle = try_lock(directory)
    if handle is None:
        raise ConfigError(f"{directory}: a run is going on there; choose another --name")
    return handle
