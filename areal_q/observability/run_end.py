"""Tells whether and how a run ended, so that a command about a run in progress need not wait in vain for it."""

import os
from contextlib import suppress
from pathlib import Path

from areal_q.observability.metrics_log import MetricsLog, read_metrics
from areal_q.system.files import try_lock
from areal_q.system.run_dir import METRICS_FILE


def how_it_ended(directory: Path) -> tuple[str, bool] | None:
    """Returns (a sentence about the run's end, whether it ended as it should); None if the run is in progress
    or may be: with REDIS_URL set, its learner may be on another machine."""
    if is_held(directory):
        return None
    path = directory / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    if records and records[-1]["kind"] == "end":
        last = records[-1]
        if error := last.get("error"):
            return f"ended: {error}", False
        return f"ended: {last.get('reason', 'done')} at step {last['step']}", True
    if "REDIS_URL" in os.environ:
        return None
    logs = f"its processes' last words are in {directory / 'logs'}"
    if not records:
        return f"ended before its first record; {logs}", False
    done = max(record["step"] for record in records)
    return f"ended without a word after {done} step{'s' * (done != 1)}; {logs}", False


def note_failure(directory: Path, error: str) -> None:
    """Records that the run in `directory`, all of whose processes have ended, ended by `error`. On a full disk
    there is no record."""
    with suppress(OSError), MetricsLog(directory, tensorboard=False) as log:
        step = max((r["step"] for r in read_metrics(directory / METRICS_FILE)), default=0)
        log.write("end", step, {}, error=error)


def is_held(directory: Path) -> bool:
    """Returns True if a launcher or a learner has locked `directory`."""
    handle = try_lock(directory)
    if handle is not None:
        os.close(handle)
    return handle is None
