"""The trajectory log: every group that the learner used, one row group for each step
(buffer/logs/parquet_log.py).

buffer/logs/trajectory_schema.py describes the columns. Any Parquet reader can read them, and `iter_log` yields
them as Groups.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from areal_q.messages import Group
from buffer.logs.parquet_log import ParquetLog, row_groups
from buffer.logs.step_log import STEP_LOG_FORMAT
from buffer.logs.trajectory_schema import (
    TRAJECTORY_LOG_FORMAT,
    groups_from_table,
    groups_to_table,
    has_episodes,
)


class TrajectoryLog(ParquetLog):
    """The writer of the trajectory log in `directory`. Groups that a crash loses from the log are still in
    Redis, where they are deleted only after a flush, so that each group is logged exactly once."""

    def __init__(self, directory: str | Path, resume_at: int = 0) -> None:
        super().__init__(directory, TRAJECTORY_LOG_FORMAT, resume_at)
        self._episodes = False
        """True since the first branch, or reward of a turn, so that they do not begin a part each time"""

    def append(self, step: int, version: int, groups: Sequence[Group]) -> None:
        """Queues the valid groups of one step in the order in which they were used. Steps must come in order;
        one without groups has no row. Waits only while the writer is QUEUE_STEPS behind."""
        if groups:
            self._episodes |= has_episodes(groups)
            episodes = self._episodes
            self.append_rows(lambda: groups_to_table(step, version, groups, episodes))


def iter_log(
    directory: str | Path,
    from_step: int = 0,
    to_step: int | None = None,
    *,
    validate: bool = True,
) -> Iterator[tuple[int, list[Group]]]:
    """Yields (step, groups) of the steps in [from_step, to_step), in the order in which the learner used them,
    with one step in memory at a time. Without `validate`, groups that are not valid are yielded too, so that a
    caller can find out what is wrong with them.

    Raises RecordError for a part that is not a trajectory log or is of a newer schema.
    """
    steps = groupby(row_groups(Path(directory), TRAJECTORY_LOG_FORMAT), key=lambda rows: rows.step)
    for step, parts in steps:
        if from_step <= step and (to_step is None or step < to_step):
            yield step, [g for rows in parts for g in groups_from_table(rows.read(), validate)]


def logged_steps(run_dir: Path) -> int:
    """Returns one more than the last step whose record and groups are both in a run's logs, or 0 if there is
    none. The run may still be going on. No row is read."""
    ends = [
        max((rows.step + 1 for rows in row_groups(run_dir / kind, format)), default=0)
        for kind, format in (("steps", STEP_LOG_FORMAT), ("trajectories", TRAJECTORY_LOG_FORMAT))
    ]
    return min(ends)
