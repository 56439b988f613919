"""The metrics of a run: one JSON line per event in `metrics.jsonl`, and the same numbers for TensorBoard.

A line is a flat JSON object, so that every tool can read it:

    {"kind": "step", "step": 12, "elapsed_s": 61.2, "time_s": 1767225600.1, "reward/mean": 0.63, …}

`kind` is note (a `message` about the run), start (what is `doing` before the first step), warmstart, waiting
(for agents, before step `step`), failing (of rewards, counted since the start), step, eval, warning or end.
Keys with a slash are metrics, `area/name_unit`; other keys (`workers`, `samples`, `reason`, `error`) hold what
is no number. The live view, the summary and the curves are made from this file alone.
"""

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from areal_q.decode_errors import in_words
from areal_q.errors import RecordError
from areal_q.system.files import replacing
from areal_q.system.run_dir import METRICS_FILE

logger = logging.getLogger(__name__)

Kind = Literal["note", "start", "warmstart", "waiting", "failing", "step", "eval", "warning", "end"]
Record = dict[str, Any]

TENSORBOARD_DIR = "tensorboard"
MOST_WORKERS = 64
"""The most workers that are listed in one line of the file; sums and means in it are over all workers."""
PART, MOST_PARTS = "reward/part_", 64
"""The prefix of metrics whose names come from a user's reward or an agent, and the most names there may be."""
BLOCK = 1 << 16
"""Bytes that are read at a time when a file is searched from its end."""


class MetricsLog:
    """Writes the records of one run; the learner is its only writer while it lives.

    Raises OSError, before any training, if the directory cannot be written. If the disk fills up later, the run
    goes on: a sink's first failure is logged and the sink is not used again.

    `elapsed_s` counts the seconds in which the run was active, from `began` (by time.monotonic) or from now. It
    continues from the last record of an existing file, without the time between a stop and its resumption.

    Example: MetricsLog("runs/demo").write("step", 3, {"reward/mean": 0.5}, workers=[])
    """

    def __init__(
        self, run_dir: str | Path, tensorboard: bool = True, began: float | None = None
    ) -> None:
        self._path = path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        last = _drop_torn_line(path)
        began = time.monotonic() if began is None else began
        self._began = began - (last["elapsed_s"] if last else 0.0)
        self._parts: set[str] = set()
        self._file = path.open("ab", buffering=0)
        self._sinks: dict[str, Callable[[Record], None]] = {"metrics.jsonl": self._write_line}
        self._tensorboard: _TensorBoard | None = None
        if tensorboard:
            self._tensorboard = _TensorBoard(path.parent / TENSORBOARD_DIR)
            self._sinks["TensorBoard"] = self._tensorboard.write

    def write(self, kind: Kind, step: int, values: Mapping[str, float], **extra: Any) -> None:
        """Appends one record and hands it to the operating system at once. NaN and ±inf become null and are
        counted as `nonfinite`; reward parts beyond the first MOST_PARTS names are left out and counted as
        `reward/parts_left_out`."""
        values = self._bounded(values)
        record: Record = {
            "kind": kind,
            "step": step,
            "elapsed_s": round(time.monotonic() - self._began, 3),
            "time_s": round(time.time(), 3),
        }
        record |= {k: float(v) if math.isfinite(v) else None for k, v in values.items()}
        nonfinite = sum(record[key] is None for key in values)
        if nonfinite:
            record["nonfinite"] = nonfinite
        record |= extra
        for name, sink in list(self._sinks.items()):
            try:
                sink(record)
            except OSError as error:
                logger.error("%s: %s; the run goes on without it", name, error)
                del self._sinks[name]

    def also(self, name: str, sink: Callable[[Record], None]) -> None:
        """Passes every further record to `sink` as well."""
        self._sinks[name] = sink

    def rewind(self, step: int) -> int:
        """Removes the records of steps after `step`, which an abandoned history wrote; returns their number."""
        self._file.close()
        dropped = truncate_after(self._path, step)
        self._file = self._path.open("ab", buffering=0)
        if self._tensorboard is not None:
            self._tensorboard.purge(step + 1)
        return dropped

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None and "TensorBoard" in self._sinks:
            self._tensorboard.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bounded(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Returns `values` without the reward parts beyond the first MOST_PARTS names: ever new names would
        begin ever new series in all displays."""
        parts = [name for name in values if name.startswith(PART)]
        for name in parts:
            if len(self._parts) < MOST_PARTS:
                self._parts.add(name)
        left_out = set(parts) - self._parts
        if not left_out:
            return values
        kept = {name: value for name, value in values.items() if name not in left_out}
        return kept | {"reward/parts_left_out": len(left_out)}

    def _write_line(self, record: Record) -> None:
        workers = record.get("workers", [])
        left_out = len(workers) - MOST_WORKERS
        if left_out > 0:
            record = record | {"workers": workers[:MOST_WORKERS], "workers_left_out": left_out}
        line = msgspec.json.encode(record) + b"\n"
        written = self._file.write(line)
        if written < len(line):  # the disk is full, or what of it the user may have
            self._file.truncate(os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _TensorBoard:
    """Writes scalars with TensorBoard's own event writer, whose import takes 0.15 s; that of
    torch.utils.tensorboard takes 1.5 s."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._session_start = SessionLog(status=SessionLog.START)
        self._writer = EventFileWriter(str(directory), flush_secs=5)

    def write(self, record: Record) -> None:
        scalars = [
            self._summary.Value(tag=key, simple_value=value)
            for key, value in record.items()
            if "/" in key and isinstance(value, float)
        ]
        event = self._event(wall_time=record["time_s"], step=record["step"])
        event.summary.value.extend(scalars)
        self._writer.add_event(event)

    def purge(self, step: int) -> None:
        """Tells TensorBoard to forget this step and later ones."""
        event = self._event(wall_time=time.time(), step=step, session_log=self._session_start)
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: str | Path) -> list[Record]:
    """Returns all records of a metrics file in their order, without a last line that is still being written.

    Raises OSError if there is no such file, and RecordError, naming the line, for a line that is no record.
    """
    data = Path(path).read_bytes()
    return _decode(data[: data.rfind(b"\n") + 1], path)


def has_ended(run_dir: str | Path) -> bool:
    """Returns True if the run's last record is `end`. Raises OSError if there is no metrics file."""
    records = read_metrics(Path(run_dir) / METRICS_FILE)
    return bool(records) and records[-1]["kind"] == "end"


class Tail:
    """Reads the records that were added to a metrics file since the last call; begins anew if it was replaced.

    Example: tail.read() returns ([first, second], True), and a second later ([third], False).
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[Record], bool]:
        """Returns (new records, whether they replace all records that were read before)."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                restarted = stat.st_ino != self._inode or stat.st_size < self._offset
                if restarted:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return [], False
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return _decode(data, self._path), restarted


def truncate_after(path: str | Path, step: int) -> int:
    """Removes the records of steps after `step`, and `end` records, from which a resumed run goes on.

    Returns how many it removed. The file is replaced as a whole; a missing file stays missing.
    """
    path = Path(path)
    if not path.exists():
        return 0
    dropped = 0
    with replacing(path) as scratch, scratch.open("wb") as kept, path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):  # it was being written
                break
            record = _decode_line(line, path, number)
            if record["kind"] == "end" or record["step"] > step:
                dropped += 1
            else:
                kept.write(line)
    return dropped


def _drop_torn_line(path: Path) -> Record | None:
    """Removes a last line that was not written to its end, and returns the last whole record, or None. It reads
    only the end of the file: a long run of many workers writes gigabytes."""
    if not path.exists():
        return None
    with path.open("r+b") as file:
        end = _last_newline(file, file.seek(0, os.SEEK_END)) + 1
        file.truncate(end)
        if not end:
            return None
        begin = _last_newline(file, end - 1) + 1
        file.seek(begin)
        return _decode(file.read(end - begin), path)[-1]


def _last_newline(file: BinaryIO, end: int) -> int:
    """Returns the offset of the last newline before offset `end`, or -1."""
    while end > 0:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found
        end = begin
    return -1


def _decode(data: bytes, path: str | Path) -> list[Record]:
    return [_decode_line(line, path, n) for n, line in enumerate(data.splitlines(), start=1)]


def _decode_line(line: bytes, path: str | Path, number: int) -> Record:
    try:
        return msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}, line {number}: {in_words(error)}") from error
