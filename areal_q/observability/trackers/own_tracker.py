"""A tracker that is a function of the user's own (areal_q/plugins.py)."""

from pathlib import Path

from areal_q.config import PythonTracker
from areal_q.errors import TaskError
from areal_q.observability.metrics_log import Record
from areal_q.observability.trackers.described import TrackedRun
from areal_q.plugins import load_function, place_of, user_code


class OwnTracker:
    """Calls the user's `tracker(run, …)` once, and what it returns with every record. That may also have
    `rewind(step)`, which forgets all after a step, and `finish(reason)`.

    Raises TaskError with the user's file and line for whatever their code raises.
    """

    def __init__(self, settings: PythonTracker, run: TrackedRun) -> None:
        self._path = settings.path
        function = load_function(settings.path, "tracker")
        with user_code(self._path):
            self._theirs = function(run, **settings.settings)
        if not callable(self._theirs):
            given = type(self._theirs).__name__
            raise TaskError(
                f"{place_of(function)}: gave {given}, where what takes a record is due, such as a function"
            )

    def log(self, record: Record) -> None:
        with user_code(self._path):
            self._theirs(record)

    def rewind(self, step: int) -> int | None:
        rewind = getattr(self._theirs, "rewind", None)
        if rewind is None:
            return None
        with user_code(self._path):
            rewind(step)
        return step

    def finish(self, report: Path | None, reason: str) -> None:
        if finish := getattr(self._theirs, "finish", None):
            with user_code(self._path):
                finish(reason)
