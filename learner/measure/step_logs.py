"""The logs of a learner's steps: groups, records and tokens, with all that a replay needs."""

import logging
from pathlib import Path

import msgspec
from msgspec.structs import replace

from areal_q.config import Run, settings_hash
from areal_q.errors import RecordError
from areal_q.observability.metrics_log import MetricsLog
from areal_q.system import run_dir
from areal_q.tasks import Tokenizer, stops_text
from areal_q.tasks.stops import write_stops
from buffer.logs.parquet_log import LogFormat, drop_from
from buffer.logs.step_log import STEP_LOG_FORMAT, StepLog, StepRecord, iter_steps
from buffer.logs.token_log import TOKEN_LOG_FORMAT, TokenLog
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.logs.trajectory_schema import TRAJECTORY_LOG_FORMAT
from buffer.sampling.replay_pool import SampledGroups
from learner.arithmetic import machine_name
from learner.data.staleness import VersionHistory
from learner.measure.token_recorder import TokenRecorder

logger = logging.getLogger(__name__)


class StepLogs:
    """Writes the logs of a run into its directory; nothing without `buffer.log`."""

    def __init__(self, run: Run, directory: Path, start: int, scores_here: bool) -> None:
        """Begins at step `start`, and forgets what is logged of later ones. There is no token log unless
        `scores_here`: with several ranks token scores stay on the rank that computed them."""
        self._run, logs = run, run.buffer.log
        tokens = logs and run.buffer.tokens and scores_here
        for name, format, on in (
            ("trajectories", TRAJECTORY_LOG_FORMAT, logs),
            ("steps", STEP_LOG_FORMAT, logs),
            ("tokens", TOKEN_LOG_FORMAT, tokens),
        ):
            if not on:  # it may have been on before
                _forget(directory / name, format, start)
        self._groups = TrajectoryLog(directory / "trajectories", start) if logs else None
        self._steps = StepLog(directory / "steps", start) if logs else None
        self._tokens = TokenLog(directory / "tokens", start) if tokens else None
        self._all = [log for log in (self._groups, self._steps, self._tokens) if log]
        self.recorder = TokenRecorder() if tokens else None
        """Records the tokens of the last step for the token log."""
        self._awaiting_digest: StepRecord | None = None
        """The last step's record, until the digest of the version that the step made is known"""

    def append(
        self, step: int, batch: SampledGroups, history: VersionHistory, values: dict[str, float]
    ) -> None:
        """Logs step `step`, whose metrics are `values` and which is about to make version `step` + 1."""
        if not self._groups:
            return
        self._groups.append(step, step, batch.groups)
        if self._tokens and self.recorder:
            self._tokens.append(step, self.recorder.scores())
        cfg = self._run.learner
        self._awaiting_digest = StepRecord(
            step=step,
            tickets=[group.ticket.number for group in batch.groups],
            seeds=[group.ticket.seed for group in batch.groups],
            weights=list(batch.weights),
            base_digest=history.digests[step],
            digest="",
            fork=history.fork,
            settings=settings_hash(self._run),
            machine=machine_name(cfg.device, str(cfg.backend.__struct_config__.tag)),
            metrics=dict(values),
        )

    def complete(self, digest: str) -> None:
        """Completes the last step's record with the digest of the version that the step made."""
        if self._steps and self._awaiting_digest:
            self._steps.append(replace(self._awaiting_digest, digest=digest))
            self._awaiting_digest = None

    def flush(self) -> None:
        """Returns once everything appended is on disk."""
        for log in self._all:
            log.flush()

    def close(self) -> None:
        """Flushes the logs and ends their threads."""
        for log in self._all:
            log.close()


def note_beginning(
    run: Run,
    directory: Path,
    start: int,
    tokenizer: Tokenizer,
    metrics: MetricsLog,
    told: list[str],
) -> None:
    """Notes what is `told` of a resumption, how responses end, and what is set otherwise than in the steps
    before `start`."""
    write_stops(directory, tokenizer.stops)
    notes = [*told, f"a response {stops_text(tokenizer.stops)}"]
    if run.buffer.log:
        notes += filter(None, [_changed_settings(run, directory, start)])
        run_dir.keep_settings(directory, run)
    for note in notes:
        logger.info("%s", note)
        metrics.write("note", start, {}, message=note)


def _changed_settings(run: Run, directory: Path, start: int) -> str:
    """Returns a sentence on the settings that are others from step `start` on; empty if there are none."""
    for record in iter_steps(directory / "steps", start - 1, start):
        before = run_dir.settings_of(directory, record.settings)
        old, new = (run_dir.flat(msgspec.to_builtins(settings)) for settings in (before, run))
        code = {
            key: new.get(key.removesuffix("digest") + "path")
            for key in new
            if key.endswith(".digest")
        }
        changed = [
            f"{code[key]} is not what it was"
            if code.get(key)
            else f"{key} = {new.get(key)}, was {old.get(key)}"
            for key in run_dir.differences(before, run)
            if key not in ("name", "root")
        ]
        if changed:
            return f"from step {start} on: {'; '.join(changed)}"
    return ""


def _forget(log: Path, format: LogFormat, start: int) -> None:
    """Removes the steps from `start` on of a log that is off. One that cannot be read stays: a run may go on
    without it."""
    try:
        drop_from(log, format, start)
    except RecordError as error:
        logger.warning("%s; it keeps what is there", error)
