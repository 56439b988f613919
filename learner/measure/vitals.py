"""Values for Prometheus that are also needed between steps and before the first one: whether Redis answers, how
full it and the disk are, and how many workers are alive."""

import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_q.errors import BufferUnavailable
from buffer.redis_store import LearnerBuffer

EVERY_S = 5.0
"""Seconds between two measurements."""
COUNT_EVERY = 12
"""Measurements between two of those that look at every file of the run."""


class Vitals(threading.Thread):
    """Measures these values every EVERY_S seconds and passes them to `record`, on a thread of its own that ends
    with the process, so that a Redis that hangs delays neither the learner nor a scrape."""

    def __init__(
        self,
        redis: str,
        run: str,
        directory: Path,
        still_to_write: Callable[[], float],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        """`still_to_write` returns how many bytes the run will add to its `directory`."""
        super().__init__(name="vitals", daemon=True)
        self._buffer = LearnerBuffer(redis, run, patience_s=0.0)
        self._directory, self._record = directory, record
        self._still_to_write = still_to_write
        record({"run/ended": 0.0})

    def run(self) -> None:
        never = threading.Event()
        for number in itertools.count():
            if number % COUNT_EVERY == 0:
                self._record({"disk/needed_bytes": self._still_to_write()})
            self._record(self.look())
            never.wait(EVERY_S)

    def look(self) -> dict[str, Any]:
        """Returns the present values by the metrics' keys; those of Redis only if it answers."""
        disk = shutil.disk_usage(self._directory)
        found: dict[str, Any] = {"disk/free_bytes": disk.free, "disk/size_bytes": disk.total}
        try:
            workers, memory = self._buffer.workers(), self._buffer.memory()
        except BufferUnavailable:
            return found | {"redis/up": 0.0}
        return found | {
            "redis/up": 1.0,
            "workers": workers,
            "redis/used_bytes": memory.used,
            "redis/limit_bytes": memory.limit,
            "buffer/full": float(memory.full),
            "buffer/waiting_commits": sum(worker.waiting for worker in workers),
        }
