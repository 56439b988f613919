"""The learner's side of the groups stream: B groups a step, none of them too old."""

import logging
import threading

from areal_q.config import LearnerConfig
from areal_q.messages import Group
from buffer.base import LearnerSide
from learner.feeder import Feeder
from learner.lineage import Lineage

logger = logging.getLogger(__name__)
POLL_S = 0.2


class Intake:
    """Takes groups in stream order. Admission keeps most of them within the bound; a straggler that was
    overtaken is dropped here, counted, and its place refilled; so is, where `drop_uniform` asks for it, a
    group whose rewards are all equal. Neither is in the trajectory log: that holds what was learnt from.

    A task on which every group is uniform, solved or hopeless, would be sampled for ever.
    """

    def __init__(
        self,
        buffer: LearnerSide,
        feeder: Feeder,
        lineage: Lineage,
        cfg: LearnerConfig,
    ) -> None:
        self._buffer, self._feeder, self._lineage = buffer, feeder, lineage
        self._groups, self._max_lag = cfg.groups, cfg.max_lag
        self._drop_uniform = cfg.drop_uniform
        self._taken: list[Group] = []
        self.position = buffer.position
        """Where the stream was after the last step that is over: what a checkpoint records"""
        self.dropped = 0
        """Groups dropped for their age since the process started"""
        self.uniform = 0
        """Groups dropped since then because their rewards were all equal"""

    def take(self, version: int, stop: threading.Event) -> list[Group] | None:
        """B groups no token of which lags more than η behind `version`; None when `stop` came first."""
        self._taken = []
        while len(self._taken) < self._groups:
            if stop.is_set():
                return None
            self._feeder.admit(version)
            groups = self._buffer.take(self._groups - len(self._taken), timeout_s=POLL_S)
            if not groups:
                self._recount()
            for group in groups:
                lag = self.lag(group, version)
                if lag > self._max_lag:
                    self.dropped += 1
                    self._drop(group, f"lag {lag}")
                elif self._drop_uniform and is_uniform(group):
                    self.uniform += 1
                    self._drop(group, f"every reward is {group.trajectories[0].reward}")
                else:
                    self._taken.append(group)
        return self._taken

    def consumed(self) -> None:
        """The step that used the groups last taken is over: only now do their places become free."""
        self.position = self._buffer.position
        for group in self._taken:
            self._feeder.done(group)
        self._taken = []

    def lag(self, group: Group, version: int) -> int:
        """The largest lag of any token in `group`."""
        return max(self._lineage.lag(s, version) for t in group.trajectories for s in t.spans)

    def _recount(self) -> None:
        """Frees the places of tickets and groups that were set aside as poison: the learner starves."""
        alive = self._buffer.open_tickets() | set(self._buffer.unread())
        self._feeder.recount(alive | {group.ticket.number for group in self._taken})

    def _drop(self, group: Group, reason: str) -> None:
        self._feeder.done(group)
        logger.info("ticket %d dropped: %s", group.ticket.number, reason)


def is_uniform(group: Group) -> bool:
    """Whether every advantage of the group would be 0 (DAPO's dynamic sampling, arXiv 2503.14476 §3.2)."""
    return len({t.reward for t in group.trajectories}) == 1
