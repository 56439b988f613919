"""Logs of learner steps as Parquet files, called parts, which a thread of their own writes:

    append ─▶ queue of 4 steps ─▶ writer thread ─▶ .part-000007.parquet.tmp ─▶ part-000007.parquet
                                                    one row group a step       complete, synced, renamed

A part gets its final name only when it is complete and on disk, so that a reader never sees an incomplete one.
The name of an unfinished part begins with a dot, which pyarrow and pandas ignore, and does not match
`*.parquet`. The first column of every schema is `step`; the schema's metadata holds its name and version.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from areal_q.errors import LogError, RecordError
from areal_q.system.files import by_number, move_into_place, sync

logger = logging.getLogger(__name__)
QUEUE_STEPS = 4
"""Most steps that wait for the writer thread; with more, `append` waits."""
PART_STEPS = 50
PART_BYTES = 256 << 20
PART_S = 60.0
"""Most seconds that a part stays open, so that a reader is behind by no more than this or one step"""


@dataclass(frozen=True)
class LogFormat:
    """The schema of a log. Its metadata holds {key: version}; a reader accepts its own version alone."""

    schema: pa.Schema
    key: bytes
    version: int
    optional: frozenset[str] = frozenset()
    """Columns that a part may lack"""


class ParquetLog:
    """The writer of a log, which appends to the parts in `directory`. A directory has only one writer.

    Rows that were appended before a `flush` that returned are on disk. Rows appended since are lost if the
    process ends. Reopening with `resume_at` deletes the rows of steps ≥ resume_at, which belong to the history
    that the resume abandons (test_reopening_at_a_step_drops_the_abandoned_steps). An error of the writer
    thread, such as a full disk, is raised by the next `append` or `flush` and by all after it, so that a part
    which lacks a step never gets its final name (test_a_full_disk_leaves_no_torn_part).
    """

    def __init__(self, directory: str | Path, format: LogFormat, resume_at: int = 0) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(".part-*.parquet.tmp"):
            logger.info("%s: unfinished, removed", path)
            path.unlink()
        drop_from(self.directory, format, resume_at)
        found = _parts(self.directory)
        self._format = format
        self._number = int(found[-1].stem.removeprefix("part-")) + 1 if found else 0
        self._writer: pq.ParquetWriter | None = None
        self._steps_in_part = 0
        self._closed_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.directory.name)
        self._pending: deque[Future[None]] = deque()
        self._error: LogError | None = None

    def append_rows(self, make: Callable[[], pa.Table]) -> None:
        """Queues the rows of one step, which `make` returns on the writer thread. Steps must come in order.
        Waits only while the writer is QUEUE_STEPS behind. Raises LogError if an earlier write failed."""
        self._submit(lambda: self._write(make()))
        self._reap(QUEUE_STEPS)

    def flush(self) -> None:
        """Returns when everything appended so far is on disk. Raises LogError if a write failed."""
        self._submit(self._close_part)
        self._reap(0)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _submit(self, work: Callable[[], None]) -> None:
        self._pending.append(self._thread.submit(self._unless_failed, work))

    def _reap(self, allowed: int) -> None:
        while self._pending and (len(self._pending) > allowed or self._pending[0].done()):
            self._pending.popleft().result()

    # The methods below run on the writer thread.

    def _unless_failed(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            work()
        except (OSError, pa.ArrowException) as error:
            self._error = LogError(f"{self._temporary}: cannot be written: {error}")
            raise self._error from error

    def _write(self, table: pa.Table) -> None:
        if self._writer is not None and not self._writer.schema.equals(table.schema):
            self._close_part()
        if self._writer is None:
            self._writer = _writer(self._temporary, table.schema)
        self._writer.write_table(table)
        self._steps_in_part += 1
        full = self._steps_in_part >= PART_STEPS or self._temporary.stat().st_size >= PART_BYTES
        if full or time.monotonic() - self._closed_s >= PART_S:
            self._close_part()

    def _close_part(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer, self._steps_in_part = None, 0
        self._closed_s = time.monotonic()
        move_into_place(self._temporary, self._part)
        self._number += 1

    @property
    def _part(self) -> Path:
        return self.directory / f"part-{self._number:06d}.parquet"

    @property
    def _temporary(self) -> Path:
        return _unfinished(self._part)


class RowGroup(NamedTuple):
    """The rows of one step in a part, to be read by `read`."""

    step: int
    path: Path
    file: pq.ParquetFile
    number: int

    def read(self) -> pa.Table:
        """Returns the rows. Raises RecordError, which names the file, if its bytes cannot be decoded."""
        try:
            table = self.file.read_row_group(self.number)
            table.validate(full=True)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{self.path}, step {self.step}: {error}") from error
        empty = [name for name in table.column_names if table.column(name).null_count]
        if empty:
            raise RecordError(f"{self.path}, step {self.step}: {empty[0]} lacks values")
        return table


def row_groups(directory: Path, format: LogFormat) -> Iterator[RowGroup]:
    """Yields the steps of a log in order. Each must be read before the next is requested.

    Raises RecordError for a part that is not a log of this format, or is of a newer version.
    """
    for path in _parts(directory):
        with open_part(path, format) as file:
            for i in range(file.num_row_groups):
                yield RowGroup(step_of(file, i), path, file, i)


def open_part(path: Path, format: LogFormat) -> pq.ParquetFile:
    """Returns the part, to be closed. Raises RecordError if it is not of this format, or of a newer version."""
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {error}") from error
    try:
        _check_schema(file.schema_arrow, format)
    except (RecordError, UnicodeDecodeError) as error:
        file.close()
        raise RecordError(f"{path}: {error}") from error
    return file


def step_of(file: pq.ParquetFile, row_group: int) -> int:
    """Returns the step whose rows a row group holds. Raises RecordError if it does not say so."""
    found = file.metadata.row_group(row_group).column(0).statistics
    if found is None or not isinstance(found.min, int):
        raise RecordError(f"row group {row_group} does not say which step it is")
    return found.min


def steps_of(part: Path) -> tuple[int, int]:
    """Returns the first and the last step of a part. Raises RecordError for a file that is not a part."""
    try:
        with pq.ParquetFile(part) as file:
            return step_of(file, 0), step_of(file, file.num_row_groups - 1)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(f"{part}: {error}") from error


def _writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Returns a writer without dictionaries, and with statistics of the column `step` alone. A row group is one
    step, so small that with them a run's log would be half as large again."""
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,
        write_statistics=[schema.names[0]],  # pyright: ignore[reportArgumentType]
    )


def _check_schema(found: pa.Schema, format: LogFormat) -> None:
    version = (found.metadata or {}).get(format.key, b"").decode()
    if version != str(format.version):
        raise RecordError(f"log schema {version or 'missing'}, this reads {format.version}")
    if strange := _strange(found, format):
        raise RecordError(f"column {strange!r} is not as its schema says")


def _strange(found: pa.Schema, format: LogFormat) -> str | None:
    """Returns the name of a column that is unknown, repeated, missing or of another type; None if there is
    none."""
    types = dict(zip(format.schema.names, format.schema.types, strict=True))
    present = dict(zip(found.names, found.types, strict=True))
    unknown = (name for name, type in present.items() if types.get(name) != type)
    twice = (name for name in found.names if found.names.count(name) > 1)
    return next(
        iter([*unknown, *twice, *sorted(types.keys() - format.optional - present.keys())]), None
    )


def _unfinished(part: Path) -> Path:
    return part.with_name(f".{part.name}.tmp")


def _parts(directory: Path) -> list[Path]:
    return by_number(directory.glob("part-*.parquet"))


def drop_from(directory: Path, format: LogFormat, step: int) -> None:
    """Deletes the rows of steps ≥ `step`. The last part is changed first, so that after a crash the log has no
    gap."""
    for path in reversed(_parts(directory)):
        temporary = _unfinished(path)
        with open_part(path, format) as file:
            numbers = range(file.num_row_groups)
            keep = [i for i in numbers if step_of(file, i) < step]
            if len(keep) == len(numbers):
                break
            if keep:
                with _writer(temporary, file.schema_arrow) as writer:
                    for i in keep:
                        writer.write_table(file.read_row_group(i))
        if keep:
            move_into_place(temporary, path)
        else:
            path.unlink()
            sync(directory)
