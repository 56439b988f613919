"""Hands the records of a run to one tracker, each once, over any number of stops, kills and resumptions.

RUN/trackers/LABEL/logged has a line `kind step hash` for each record that the tracker has taken. It is written
after the tracker took it, so that a tracker killed in between gets that one record again.

A resumed run goes on from a checkpoint, and the steps after it are written anew. A tracker that can forget
steps does, and gets the new ones. From the others the new ones are kept back, so that no step is there twice:
what they show of these steps is what was logged first, and the run's own report shows what was learnt.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from areal_q.observability.metrics_log import Record, Tail
from areal_q.system.files import write_whole
from areal_q.system.run_dir import METRICS_FILE

Place = tuple[str, int]
"""The kind and the step of a record"""


class Tracker(Protocol):
    """Takes the records of one run. Its methods may raise anything: that ends the process, and no more."""

    def log(self, record: Record) -> None:
        """Takes one record of metrics.jsonl."""
        ...

    def rewind(self, step: int) -> int | None:
        """Forgets all after `step`, or more. Returns up to which step it has kept all, -1 if none; None, and
        forgets nothing, if it cannot."""
        ...

    def finish(self, report: Path | None, reason: str) -> None:
        """Ends the tracker's run, with the report if there is one. `reason` is that of the run's end, such as
        done or drained; "" if the run did not say."""
        ...


class Logged:
    """The records that a tracker has taken, by their hashes, in a file that survives kill -9."""

    def __init__(self, path: Path) -> None:
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self._path = path
        self._places: dict[str, Place] = {}
        for kind, step, digest in map(str.split, whole.splitlines()):
            self._places[digest] = (kind, int(step))
        if whole != text:  # it was killed while it wrote
            self._rewrite()

    def __contains__(self, record: Record) -> bool:
        return _digest(record) in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, record: Record) -> None:
        place = self._places[_digest(record)] = (record["kind"], record["step"])
        with self._path.open("a") as file:
            file.write(_line(_digest(record), place))

    def lost(self, records: Iterable[Record]) -> set[Place]:
        """Returns where there were steps and evaluations that `records`, which are all that there are, lack."""
        there = {_digest(record) for record in records}
        gone = (place for digest, place in self._places.items() if digest not in there)
        return {place for place in gone if place[0] in ("step", "eval")}

    def forget(self, after: int) -> None:
        """Forgets the records of steps after `after`."""
        self._places = {d: place for d, place in self._places.items() if place[1] <= after}
        self._rewrite()

    def _rewrite(self) -> None:
        write_whole(self._path, "".join(_line(*one) for one in self._places.items()))


class Feed:
    """Follows the metrics of the run in `directory` for one tracker, whose records taken are in `logged`."""

    def __init__(self, directory: Path, tracker: Tracker, logged: Logged) -> None:
        self._tail = Tail(directory / METRICS_FILE)
        self._tracker = tracker
        self._logged = logged
        self._held_back: set[Place] = set()
        self.end: Record | None = None
        """The `end` record, if it is the newest"""
        self.kept_back = 0
        """Records of steps that were written anew, which the tracker did not get"""

    def pass_on(self) -> int:
        """Hands what is new to the tracker. Returns how many records it took."""
        records, replaced = self._tail.read()
        if replaced:
            # The file was written anew or opened: the records are all of it.
            self._held_back = lost = self._logged.lost(records)
            kept = self._tracker.rewind(min(step for _, step in lost) - 1) if lost else None
            if kept is not None:
                self._logged.forget(after=kept)
                self._held_back = set()
        taken = 0
        for record in records:
            self.end = record if record["kind"] == "end" else None
            if record in self._logged:
                continue
            if (record["kind"], record["step"]) in self._held_back:
                self.kept_back += 1
            else:
                self._tracker.log(record)
                taken += 1
            self._logged.add(record)
        return taken


def _digest(record: Record) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(record))


def _line(digest: str, place: Place) -> str:
    return f"{place[0]} {place[1]} {digest}\n"
