"""The record of a run: a JSON line per event in `metrics.jsonl`, the same scalars for TensorBoard.

A line is flat, so that every tool can read it:

    {"kind": "step", "step": 12, "elapsed_s": 61.2, "time_s": 1767225600.1, "reward/mean": 0.63, …}

`kind` is warmstart, step, eval, warning or end; keys with a slash are `area/name_unit`; what is not a number
(`workers`, `samples`, `reason`) stands beside them. The live view, the summary and the curves
read nothing else.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_q.errors import RecordError
from areal_q.system.files import replacing
from areal_q.system.run_dir import METRICS_FILE

logger = logging.getLogger(__name__)

Kind = Literal["warmstart", "step", "eval", "warning", "end"]
Record = dict[str, Any]

TENSORBOARD_DIR = "tensorboard"


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
        before = _drop_torn_line(path)
        self._began = time.monotonic() - (before[-1]["elapsed_s"] if before else 0.0)
        self._file = path.open("ab", buffering=0)
        self._sinks: dict[str, Callable[[Record], None]] = {"metrics.jsonl": self._write_line}
        self._tensorboard: _TensorBoard | None = None
        if tensorboard:
            self._tensorboard = _TensorBoard(path.parent / TENSORBOARD_DIR)
            self._sinks["TensorBoard"] = self._tensorboard.write

    def write(self, kind: Kind, step: int, values: Mapping[str, float], **extra: Any) -> None:
        """Appends one record at once. NaN and ±inf become null and are counted as `nonfinite`."""
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

    def _write_line(self, record: Record) -> None:
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
    """Whether the last record is the run's end. Raises OSError where there is no metrics file."""
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
    records = read_metrics(path)
    kept = [r for r in records if r["step"] <= step and r["kind"] != "end"]
    with replacing(path) as scratch:
        scratch.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in kept))
    return len(records) - len(kept)


def _drop_torn_line(path: Path) -> list[Record]:
    """The records of an existing file; cuts off a torn last line, so that the next starts clean."""
    if not path.exists():
        return []
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
    return read_metrics(path)


def _decode(data: bytes, path: str | Path) -> list[Record]:
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}, line {number}: {error}") from error
    return records
