"""Counts of the episodes that agents of the user's own play, from the workers' heartbeats."""

import time
from collections.abc import Callable, Sequence

from areal_q.config import EnvironmentConfig, External
from areal_q.messages import WorkerStatus

LOOK_EVERY_S = 2.0
"""Seconds between two readings of the heartbeats while the learner waits."""


class AgentEpisodes:
    """Counts episodes, and those of them that agents play; nothing unless rollout.environment is external."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._expected = isinstance(environment, External)
        self._told = self.metrics([])
        self._next_s = 0.0

    def metrics(self, workers: Sequence[WorkerStatus]) -> dict[str, float]:
        """Returns the counts over all `workers`."""
        if not self._expected:
            return {}
        return {
            "rollout/episodes": sum(w.episodes for w in workers),
            "rollout/open_episodes": sum(w.open_episodes for w in workers),
        }

    def changed(self, workers: Callable[[], Sequence[WorkerStatus]]) -> dict[str, float]:
        """Returns the counts if they have changed, else nothing; reads them at most every LOOK_EVERY_S."""
        if not self._expected or time.monotonic() < self._next_s:
            return {}
        self._next_s = time.monotonic() + LOOK_EVERY_S
        found = self.metrics(workers())
        if found == self._told:
            return {}
        self._told = found
        return found
