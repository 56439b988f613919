"""The step log: one row for every learner step, with everything that a replay is compared with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa

from buffer.logs.parquet_log import LogFormat, ParquetLog, row_groups

_SCHEMA_VERSION = 1
_METADATA_KEY = b"areal-q-steps-schema"


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One learner step; each field is a column of the log."""

    step: int
    """The learner step s, which starts from weights of version s and makes version s + 1"""
    tickets: list[int]
    """Ticket numbers of the batch's groups, in the order in which they were used"""
    seeds: list[int]
    """The seeds of these tickets: response i of a group was drawn with seed + i."""
    weights: list[float] = []
    """Weights of these groups' advantages, from a sampler with priorities. Empty means that all are 1."""
    base_digest: str
    """The digest of version s as published (areal_q/weights/version.py)."""
    digest: str
    """The digest of version s + 1: equal digests are equal weights, bit for bit."""
    fork: int
    """The step at which this process of the learner began (learner/data/staleness.py)."""
    settings: str
    """A hash of the settings in force (areal_q/config): steps with equal hashes had equal settings."""
    machine: str
    """Everything that the arithmetic depends on: torch's version, device, instruction set, number of threads"""
    metrics: dict[str, float]
    """The metrics of the step that follow from weights, groups and settings alone"""


_COLUMN_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    str: pa.string(),
    list[int]: pa.list_(pa.int64()),
    list[float]: pa.list_(pa.float64()),
    dict[str, float]: pa.map_(pa.string(), pa.float64()),
}
STEP_SCHEMA = pa.schema(
    [(name, _COLUMN_TYPES[kind]) for name, kind in get_type_hints(StepRecord).items()],
    metadata={_METADATA_KEY: str(_SCHEMA_VERSION)},
)
STEP_LOG_FORMAT = LogFormat(STEP_SCHEMA, _METADATA_KEY, _SCHEMA_VERSION)


class StepLog(ParquetLog):
    """The writer of the step log in `directory`, which is flushed together with the trajectory log."""

    def __init__(self, directory: str | Path, resume_at: int = 0) -> None:
        super().__init__(directory, STEP_LOG_FORMAT, resume_at)

    def append(self, record: StepRecord) -> None:
        row = msgspec.structs.asdict(record) | {"metrics": list(record.metrics.items())}
        self.append_rows(lambda: pa.Table.from_pylist([row], schema=STEP_SCHEMA))


def iter_steps(
    directory: str | Path, from_step: int = 0, to_step: int | None = None
) -> Iterator[StepRecord]:
    """Yields the records of the steps in [from_step, to_step), in order.

    Raises RecordError for a part that is not a step log or is of a newer schema.
    """
    for rows in row_groups(Path(directory), STEP_LOG_FORMAT):
        if from_step <= rows.step and (to_step is None or rows.step < to_step):
            for row in rows.read().to_pylist():
                yield StepRecord(**(row | {"metrics": dict(row["metrics"])}))
