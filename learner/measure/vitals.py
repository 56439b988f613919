"""Values for Prometheus that are also needed between steps and before the first one: whether Redis answers, how
full it and the disk are, and how many workers are alive."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_q.errors import BufferUnavailable
from buffer.redis_store import LearnerBuffer

EVERY_S = 5.0
"""Seconds between two measurements."""


class Vitals(threading.Thread):
    """Measures these values every EVERY_S seconds and passes them to `record`, on a thread of its own that ends
    with the process, so that a Redis that hangs delays neither the learner nor a scrape."""

    def __init__(
        self, redis: str, run: str, directory: Path, record: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(name="vitals", daemon=True)
        self._buffer = LearnerBuffer(redis, run, patience_s=0.0)
        self._directory, self._record = directory, record
        record({"run/ended": 0.0})

    def run(self) -> None:
        never = threading.Event()
        self._record(self.look())
        while not never.wait(EVERY_S):
            self._record(self.look())

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
