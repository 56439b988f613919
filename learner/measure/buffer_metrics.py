"""Metrics of Redis and of the workers' heartbeats in it."""

import time
from collections.abc import Callable, Sequence

from areal_q.config import EnvironmentConfig
from areal_q.messages import WorkerStatus
from areal_q.observability.metrics_log import MetricsLog
from buffer.redis_store import LearnerBuffer
from learner.measure.agent_episodes import AgentEpisodes
from learner.measure.worker_rates import WorkerRates

LOOK_EVERY_S = 1.0
"""Seconds between two looks at what workers say of failing rewards"""


class BufferMetrics:
    """Measures between two steps, and while one waits for groups."""

    def __init__(
        self, buffer: LearnerBuffer, environment: EnvironmentConfig, metrics: MetricsLog
    ) -> None:
        self._buffer, self._metrics = buffer, metrics
        self._rates, self._episodes = WorkerRates(), AgentEpisodes(environment)
        self._evicts = False
        """True if Redis was seen to delete what the run keeps there, once it is at its limit"""
        self._look_s, self._tell_at = 0.0, 0.0
        """When heartbeats are looked at for failing rewards, and how many of these are told the next time"""

    def begin(self) -> None:
        """Forgets what workers drew until now, for an earlier learner."""
        self._rates.metrics(self._buffer.workers())

    def record_episodes(self, step: int) -> None:
        """Writes a `waiting` record if the number of agents' episodes has changed while `step` waits."""
        if counts := self._episodes.changed(self._buffer.workers):
            self._metrics.write("waiting", step, counts)

    def record_failures(self, step: int, totals: Callable[[], dict[str, float]]) -> None:
        """Writes a `failing` record with `totals` once a worker says how a reward failed, and again for ten
        times as many, since the step that tells it may be long in coming."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_EVERY_S
        workers = self._buffer.workers()
        if not any(worker.failure for worker in workers):
            return
        counts = totals()
        if counts["buffer/reward_errors"] >= self._tell_at:
            self._tell_at = 10 * max(1.0, counts["buffer/reward_errors"])
            self._metrics.write("failing", step, counts, workers=workers)

    def measure(self, step: int, workers: Sequence[WorkerStatus]) -> dict[str, float]:
        """Returns the metrics after step `step`, and writes a `warning` record once Redis deletes groups."""
        memory = self._buffer.memory()
        if memory.evicts and not self._evicts:
            policy = f"maxmemory-policy is {memory.policy} now"
            message = f"redis deletes groups and tickets at its limit: {policy}"
            self._metrics.write("warning", step, {}, message=message)
        self._evicts = memory.evicts
        return {
            **self._rates.metrics(workers),
            **self._episodes.metrics(workers),
            "buffer/quarantined": self._buffer.quarantined_total(),
            "buffer/refused_heartbeats": self._buffer.refused_heartbeats,
            "buffer/full": float(memory.full),
            "buffer/waiting_commits": sum(w.waiting for w in workers),
            "weights/behind_s": max((w.behind_s for w in workers), default=0.0),
            "redis/used_bytes": memory.used,
            "redis/limit_bytes": memory.limit,
        }
