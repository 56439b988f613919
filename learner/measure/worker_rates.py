"""What the workers did between two steps, from the counts in their heartbeats."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from areal_q.messages import WorkerStatus

OWN_S = 10.0
"""Seconds over which a heartbeat's own rates are, where the worker has lived as long"""


class Counts(NamedTuple):
    """A worker's counts at a Unix time."""

    time_s: float
    pid: int
    tokens: int
    busy_s: float


class WorkerRates:
    """Works out rates from the growth of each worker's counts since the last time it was asked.

    A step may be shorter than a heartbeat's interval, or far longer, with workers that have run out of tickets
    at its end: so what counts is the time between the last heartbeats before both times, not the step's.
    """

    def __init__(self) -> None:
        self._asked_s = time.time()
        self._last: dict[str, Counts] = {}
        """The counts of each worker that was ever seen, at its last heartbeat"""
        self._rates: dict[str, tuple[float, float]] = {}
        """Tokens per second and idle share of each of them"""

    def metrics(self, workers: Sequence[WorkerStatus]) -> dict[str, float]:
        """Returns the sum of the workers' tokens per second, and the mean of their idle shares."""
        rates = [self._rate(worker) for worker in workers]
        self._asked_s = time.time()
        return {
            "rollout/tokens_per_s": sum(tokens for tokens, _ in rates),
            "rollout/idle_share": sum(idle for _, idle in rates) / max(1, len(rates)),
        }

    def _rate(self, worker: WorkerStatus) -> tuple[float, float]:
        """Returns tokens per second and idle share since the last heartbeat before; if no other has come, they
        stay as they were. A worker that is new, or has begun anew, has counted from 0 on."""
        now = Counts(worker.time_s, worker.pid, worker.tokens, worker.busy_s)
        before = self._last.get(worker.worker)
        if before is None:
            before = Counts(self._asked_s, now.pid, 0, 0.0)
            span_s = now.time_s - before.time_s
            if span_s < OWN_S or now.busy_s > span_s:
                # It began before, maybe for a learner before this one: its own rates are over its last seconds.
                self._rates[worker.worker] = worker.tokens_per_s, worker.idle_share
                before = now
        # In a container every process has the same number: only its counts are smaller than before.
        if now.pid != before.pid or now.tokens < before.tokens or now.busy_s < before.busy_s:
            before = Counts(before.time_s, now.pid, 0, 0.0)
        span_s = now.time_s - before.time_s
        if span_s > 0:
            idle = 1 - (now.busy_s - before.busy_s) / span_s
            rate = (now.tokens - before.tokens) / span_s, min(1.0, max(0.0, idle))
            self._rates[worker.worker] = rate
        self._last[worker.worker] = now
        return self._rates.get(worker.worker, (0.0, 1.0))
