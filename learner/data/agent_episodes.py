"""Counts of the episodes that agents of the user's own play, from the workers' heartbeats."""

import time
from collections.abc import Callable, Sequence

from areal_q.config import External, Run
from areal_q.messages import WorkerStatus

LOOK_EVERY_S = 2.0
"""Seconds from one look at the heartbeats to the next, while the learner waits"""


class AgentEpisodes:
    """Tells how many episodes are open, of how many; nothing where no agents play (rollout.environment)."""

    def __init__(self, run: Run) -> None:
        self._expected = isinstance(run.rollout.environment, External)
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
        """Returns the counts if they are others than at the last call that looked; calls look every
        LOOK_EVERY_S seconds."""
        if not self._expected or time.monotonic() < self._next_s:
            return {}
        self._next_s = time.monotonic() + LOOK_EVERY_S
        found = self.metrics(workers())
        if found == self._told:
            return {}
        self._told = found
        return found
