"""Tells whether and how a run ended, so that a command about a run in progress need not wait in vain for it,
and from where a resumed one goes on."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from areal_q.config import Run
from areal_q.errors import RecordError
from areal_q.observability.learning_faults import learning_faults
from areal_q.observability.metrics_log import MetricsLog, Record, read_metrics
from areal_q.observability.run_summary import best_of
from areal_q.system.files import try_lock
from areal_q.system.run_dir import METRICS_FILE, checkpoints_of


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
    with suppress(OSError, RecordError), MetricsLog(directory, tensorboard=False) as log:
        step = max((r["step"] for r in read_metrics(directory / METRICS_FILE)), default=0)
        log.write("end", step, {}, error=error)


def going_on(run: Run, directory: Path, start: int, records: Sequence[Record]) -> Iterator[str]:
    """Yields sentences on a run of these records that resumes from the checkpoint of step `start`: which steps
    it makes again, and the way back to a better checkpoint if it was ruined before."""
    made = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    if made > start:
        again = f"steps {start + 1} to {made}" if made > start + 1 else f"step {made}"
        yield f"goes on from the checkpoint of step {start}: {again}, logged already, will be made again"
    before = [r for r in records if r["step"] <= start]
    for fault in learning_faults(before):
        if fault.name in ("policy diverged", "reward collapsed"):
            best = best_checkpoint(run, directory, before)
            way = "no older checkpoint that is better was kept (eval.best keeps the best)"
            if best and best[0] < start:
                step, metric, value = best
                lr = f"learner.optimizer.lr={run.learner.optimizer.rate / 10:g}"
                way = f"the best checkpoint is that of step {step} ({metric} {value:.3f}); to go on from it: "
                way += f"Ctrl-C, then areal-q run {directory} --resume --from {step} {lr}"
            yield f"{fault.says}; {way}"
            return


def best_checkpoint(
    run: Run, directory: Path, records: Sequence[Record]
) -> tuple[int, str, float] | None:
    """Returns (step, metric, value) of the best of the checkpoints that are there, by the metric `eval.best`,
    without one by the held-out accuracy; None if none was evaluated."""
    metric, steps = run.eval.best or "eval/accuracy", checkpoints_of(directory)
    evals = [r for r in records if r["kind"] == "eval" and r["step"] in steps]
    found = best_of((r for r in evals if r.get(metric) is not None), metric, run)
    return (found["step"], metric, found[metric]) if found else None


def is_held(directory: Path) -> bool:
    """Returns True if a launcher or a learner has locked `directory`."""
    handle = try_lock(directory)
    if handle is not None:
        os.close(handle)
    return handle is None
