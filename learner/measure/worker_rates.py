"""What the workers did between two steps, from the counts in their heartbeats."""

from collections.abc import Sequence

from areal_q.messages import WorkerStatus


class WorkerRates:
    """Works out rates from the growth of each worker's counts since the last time it was asked.

    A step may be shorter than a heartbeat's interval, or far longer, with workers that have run out of tickets
    at its end: so what counts is the time between the last heartbeats before both times, not the step's.
    """

    def __init__(self) -> None:
        self._last: dict[str, WorkerStatus] = {}
        """The last heartbeat of each worker that was ever seen"""
        self._rates: dict[str, tuple[float, float]] = {}
        """Tokens per second and idle share of each of them"""

    def metrics(self, workers: Sequence[WorkerStatus]) -> dict[str, float]:
        """Returns the sum of the workers' tokens per second, and the mean of their idle shares."""
        rates = [self._rate(worker) for worker in workers]
        return {
            "rollout/tokens_per_s": sum(tokens for tokens, _ in rates),
            "rollout/idle_share": sum(idle for _, idle in rates) / max(1, len(rates)),
        }

    def _rate(self, now: WorkerStatus) -> tuple[float, float]:
        """Returns tokens per second and idle share since the heartbeat that was the last one before. If there
        was none, or the worker has begun anew since, they are those that it tells itself; if no other has come,
        they stay as they were."""
        before = self._last.get(now.worker)
        self._last[now.worker] = now
        if before is None or _began_anew(before, now):
            rate = now.tokens_per_s, now.idle_share
        elif now.time_s > before.time_s:
            span_s = now.time_s - before.time_s
            idle = 1 - (now.busy_s - before.busy_s) / span_s
            rate = (now.tokens - before.tokens) / span_s, min(1.0, max(0.0, idle))
        else:
            rate = self._rates[now.worker]
        self._rates[now.worker] = rate
        return rate


def _began_anew(before: WorkerStatus, now: WorkerStatus) -> bool:
    """Returns True if the counts began at 0 again, in another process or, in a container, under its number."""
    fell = now.tokens < before.tokens or now.busy_s < before.busy_s
    return fell or now.pid != before.pid
