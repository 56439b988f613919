"""The trajectory log: every group that the learner consumed, one row group a step (buffer/logs/parquet_log.py).

The columns are described in buffer/logs/trajectory_schema.py; any Parquet reader opens them, and `read_log`
gives Groups back.
"""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from areal_q.messages import Group
from buffer.logs.parquet_log import ParquetLog, row_groups
from buffer.logs.step_log import STEP_LOG_FORMAT
from buffer.logs.trajectory_schema import (
    TRAJECTORY_LOG_FORMAT,
    groups_from_table,
    groups_to_table,
)


class TrajectoryLog(ParquetLog):
    """Appends consumed groups to the parts in `directory`. Groups that a crash takes from the log are still
    in Redis, since they are trimmed there only after a flush: each group counts once."""

    def __init__(self, directory: str | Path, resume_at: int = 0) -> None:
        super().__init__(directory, TRAJECTORY_LOG_FORMAT, resume_at)

    def append(self, step: int, version: int, groups: list[Group]) -> None:
        """Queues the groups of one step, valid ones, in the order in which they were used. Steps come in
        order; one without groups leaves no row. Waits only while the writer is QUEUE_STEPS behind."""
        if groups:
            self.append_rows(lambda: groups_to_table(step, version, groups))


def read_log(
    directory: str | Path, from_step: int = 0, to_step: int | None = None
) -> list[tuple[int, list[Group]]]:
    """The groups of the steps in [from_step, to_step), in the order in which the learner used them.

    Raises RecordError for a part that is no log of ours or of a newer schema.
    """
    return list(iter_log(directory, from_step, to_step))


def iter_log(
    directory: str | Path,
    from_step: int = 0,
    to_step: int | None = None,
    *,
    validate: bool = True,
) -> Iterator[tuple[int, list[Group]]]:
    """Like `read_log`, one step in memory at a time. Without `validate`, groups that break their contract
    are given as they are, for whoever looks for what is wrong with them."""
    steps = groupby(row_groups(Path(directory), TRAJECTORY_LOG_FORMAT), key=lambda rows: rows.step)
    for step, parts in steps:
        if from_step <= step and (to_step is None or step < to_step):
            yield step, [g for rows in parts for g in groups_from_table(rows.read(), validate)]


def logged_steps(run_dir: Path) -> int:
    """One more than the last step of which both the record and the groups are in the log of a run, which may be
    going on; 0 where there is none. Reads no row."""
    ends = [
        max((rows.step + 1 for rows in row_groups(run_dir / kind, format)), default=0)
        for kind, format in (("steps", STEP_LOG_FORMAT), ("trajectories", TRAJECTORY_LOG_FORMAT))
    ]
    return min(ends)
