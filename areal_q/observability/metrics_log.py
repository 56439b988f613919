"""The record of a run: a JSON line per event in `metrics.jsonl`, the same scalars for TensorBoard.

A line is flat, so that every tool can read it:

    {"kind": "step", "step": 12, "elapsed_s": 61.2, "time_s": 1767225600.1, "reward/mean": 0.63, …}

`kind` is warmstart, waiting (for agents, before step `step`), step, eval, warning or end; keys with a slash are
`area/name_unit`; what is not a number (`workers`, `samples`, `reason`) stands beside them. The live view, the
summary and the curves read nothing else.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from areal_q.errors import RecordError
from areal_q.system.files import replacing
from areal_q.system.run_dir import METRICS_FILE

logger = logging.getLogger(__name__)

Kind = Literal["warmstart", "waiting", "step", "eval", "warning", "end"]
Record = dict[str, Any]

TENSORBOARD_DIR = "tensorboard"
MOST_WORKERS = 64
"""Workers that a line of the file holds; sums and means beside them are over all"""
PART, MOST_PARTS = "reward/part_", 64
"""How metrics begin that are named by a user's reward or an agent, and how many of them there may be"""
BLOCK = 1 << 16


class MetricsLog:
    """Writes the records of one run; the learner is its only writer.

    A directory that cannot be written raises OSError here, before any training. A disk that fills
    up later costs records, not the run: a sink's first failure is logged and the sink given up.

    `elapsed_s` counts the seconds that the run was on: it goes on from the last record of an
    existing file, so the time between a stop and its resumption is left out.

    Example: MetricsLog("runs/demo").write("step", 3, {"reward/mean": 0.5}, workers=[])
    """

    def __init__(self, run_dir: str | Path, tensorboard: bool = True) -> None:
        self._path = path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        last = _drop_torn_line(path)
        self._began = time.monotonic() - (last["elapsed_s"] if last else 0.0)
        self._parts: set[str] = set()
        self._file = path.open("ab", buffering=0)
        self._sinks: dict[str, Callable[[Record], None]] = {"metrics.jsonl": self._write_line}
        self._tensorboard: _TensorBoard | None = None
        if tensorboard:
            self._tensorboard = _TensorBoard(path.parent / TENSORBOARD_DIR)
            self._sinks["TensorBoard"] = self._tensorboard.write

    def write(self, kind: Kind, step: int, values: Mapping[str, float], **extra: Any) -> None:
        """Appends one record at once. NaN and ±inf become null and are counted as `nonfinite`; parts of the
        reward beyond the first MOST_PARTS names are counted as `reward/parts_left_out`."""
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
        """Hands every record from now on to `sink` as well."""
        self._sinks[name] = sink

    def rewind(self, step: int) -> int:
        """Resumes at `step`: drops what an abandoned history wrote later, and returns how much."""
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
        """`values` without parts of the reward under ever new names, each of which would begin a series."""
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
        self._file.write(msgspec.json.encode(record) + b"\n")


class _TensorBoard:
    """TensorBoard's own event writer: imports in 0.15 s, torch.utils.tensorboard in 1.5 s."""

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
    """All records of a metrics file, in order, without a last line that is still being written.

    Raises OSError if there is no such file, RecordError naming the line that is not a record.
    """
    data = Path(path).read_bytes()
    return _decode(data[: data.rfind(b"\n") + 1], path)


def has_ended(run_dir: str | Path) -> bool:
    """Returns True if the last record is the run's end. Raises OSError where there is no metrics file."""
    records = read_metrics(Path(run_dir) / METRICS_FILE)
    return bool(records) and records[-1]["kind"] == "end"


class Tail:
    """The records added to a metrics file since the last look; starts over when it was replaced.

    Example: tail.read() == ([first, second], True), a second later ([third], False).
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._inode = -1
        self._offset = 0

    def read(self) -> tuple[list[Record], bool]:
        """(new records, whether they replace all that was read before)."""
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
    """Drops the records of steps after `step`, and `end` records: the history goes on from there.

    Returns how many were dropped. The file is replaced in one piece; a missing one stays missing.
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
    """Cuts off a torn last line, so that the next starts clean, and returns the last record. Reads the end of
    the file alone: a long run of many workers writes gigabytes."""
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
    """Place of the last newline before `end`, or -1."""
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
        raise RecordError(f"{path}, line {number}: {error}") from error
