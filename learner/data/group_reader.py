"""Reading of the groups that workers commit, and the choice of B groups for a step, none of them too old."""

import logging
import threading
from collections.abc import Sequence

from areal_q.config import LearnerConfig
from areal_q.messages import Group
from buffer.interface import Entry
from buffer.redis_store import LearnerBuffer
from buffer.sampling.replay_pool import ReplayPool, SampledGroups
from buffer.sampling.samplers import PooledGroup
from learner.data.admission import Admission
from learner.data.invalid_rewards import Failures
from learner.data.staleness import VersionHistory
from learner.data.starvation import Starvation, sentence
from learner.data.turn_rewards import is_uniform

logger = logging.getLogger(__name__)
POLL_S = 0.2


class WhileWaiting:
    """What else is done while `GroupReader.take` waits: by a learner all of it (learner/loop.py), by this class
    nothing. `step` is the one that the groups are for."""

    def look(self) -> None:
        """Called before each poll for groups, so that a waiting learner does not count as stuck."""

    def record_episodes(self, step: int) -> None:
        """Called every POLL_S seconds while no groups come in."""

    def warn(self, step: int, sentence: str) -> None:
        """Called with a sentence on what is lacking when the learner has waited long for groups."""

    def make_room(self, step: int) -> bool:
        """Called while no groups come in and Redis has no room for them. Returns False if it can make none."""
        return False

    def wait_until_out(self) -> None:
        """Returns once the version that the step begins with is in the history.

        Called before the lag of groups drawn by a version of this number is computed: a resumed learner reads
        groups of its abandoned history, and if its replay was exact, bit for bit, they count as drawn by its
        own version."""


class GroupReader:
    """Reads groups in stream order into the pool that the sampler draws from.

    Admission keeps most groups within the staleness bound. Before every draw the following groups are dropped,
    counted and replaced by further tickets: groups that are too old for the present version; groups with too
    few valid responses for an advantage; groups whose rewards are all equal, if `drop_uniform` is set; and
    groups beyond a bound of `buffer.removal`. The trajectory log contains none of them.

    With `drop_uniform`, a task whose groups are all uniform, solved or hopeless, never gives a step.
    """

    def __init__(
        self,
        buffer: LearnerBuffer,
        admission: Admission,
        history: VersionHistory,
        cfg: LearnerConfig,
        pool: ReplayPool,
    ) -> None:
        self._buffer, self._admission, self._history = buffer, admission, history
        self._cfg, self._pool = cfg, pool
        self._before = set(buffer.unread())
        """Tickets whose groups were there before: a reward that failed for all of them may be mended since."""
        self._starvation = Starvation()
        self._met_worker = self._said_full = False
        self._newest = -1
        """The newest version that drew a token of any group read."""
        self.groups = 0
        """Number of groups read since the process started, including dropped ones."""
        self.dropped = 0
        """Number of groups dropped since then because a token lagged too many versions behind."""
        self.uniform = 0
        """Number of groups dropped since then because their rewards were all equal."""
        self.failures = Failures(2 * cfg.groups * cfg.group_size)
        """Failed rewards of all responses read since then, including those of dropped groups."""
        self.invalid = 0
        """Number of groups dropped since then because too few of their responses were valid."""
        self.removed = 0
        """Number of groups dropped since then by `buffer.removal`."""
        self.duplicates = 0
        """Number of groups read since then whose ticket had already been counted."""

    @property
    def position(self) -> str:
        """The place in the groups stream up to which all groups are finished; a checkpoint records it."""
        return self._pool.position

    @property
    def uses(self) -> dict[int, int]:
        """Number of uses of each unfinished group that was used, by ticket; a checkpoint records it."""
        return {n: k for n, k in self._pool.uses.items() if n in self._admission.outstanding}

    def totals(self) -> dict[str, float]:
        """Returns the counts since the process started, by the metric's name."""
        return {
            "buffer/dropped_stale": self.dropped,
            "buffer/dropped_uniform": self.uniform,
            "buffer/dropped_invalid": self.invalid,
            "buffer/removed": self.removed,
            "buffer/duplicates": self.duplicates,
            **self.failures.metrics(),
        }

    def unfinished_totals(self) -> dict[str, float]:
        """Returns the part of `totals` from unfinished groups, which a resumed learner reads and counts
        again."""
        again = Failures(0)
        for group in self._pool.groups:
            again.count(group)
        return again.metrics()

    @property
    def held(self) -> int:
        """Number of groups that were read and are not finished."""
        return len(self._pool)

    def take(
        self, version: int, stop: threading.Event, meanwhile: WhileWaiting | None = None
    ) -> SampledGroups | None:
        """Returns B groups no token of which lags more than η behind `version`, or None if `stop` came first.
        While it waits, it calls the methods of `meanwhile`."""
        meanwhile = meanwhile or WhileWaiting()
        while not stop.is_set():
            meanwhile.look()
            self._admission.admit(version)
            # As many as the pool asks for; it waits only if the pool has too few for a step.
            missing, ahead = self._pool.missing, self._pool.ahead
            entries = self._buffer.read(missing, timeout_s=POLL_S) if missing else []
            if ahead and len(entries) == missing:
                entries += self._buffer.read(ahead, timeout_s=0.0)
            if entries and self._starvation.over():
                self._buffer.starves("")
            for entry in entries:
                self._offer(entry)
            if self._newest >= version and version not in self._history.digests:
                meanwhile.wait_until_out()
            self._remove(version)
            drawn = self._pool.draw(version)
            if drawn:
                return drawn
            if not entries:
                meanwhile.record_episodes(version)
                self._recover(version)
                if complaint := self._complaint():
                    meanwhile.warn(version, complaint)
                if self._lacks_room() and not meanwhile.make_room(version):
                    self._say_full()
        return None

    def consumed(self) -> None:
        """Ends the use of the groups taken last, whose step is over; only now do finished ones make room."""
        for item in self._pool.used():
            self._admission.done(item.group)

    def lag(self, group: Group, version: int) -> int:
        """Returns the largest lag of any token in `group`."""
        return max(self._history.lag(s, version) for t in group.trajectories for s in t.all_spans)

    def _offer(self, entry: Entry) -> None:
        group, number = entry.group, entry.group.ticket.number
        if number in self._pool or not self._admission.expects(number):
            self.duplicates += 1
            self._pool.pass_over(entry)
            logger.info("ticket %d counted already: its second group is passed over", number)
            return
        self.groups += 1
        self._newest = max(
            self._newest, *(s.version for t in group.trajectories for s in t.all_spans)
        )
        judge = self.failures.count if number in self._before else self.failures.add
        judge(group)
        if len(group.valid_trajectories) < self._cfg.fewest_valid:
            self.invalid += 1
            self._refuse(entry, "too few of its responses could be scored")
        elif self._cfg.drop_uniform and is_uniform(group):
            self.uniform += 1
            self._refuse(entry, f"every reward is {group.valid_trajectories[0].reward}")
        else:
            self._pool.add(entry)

    def _refuse(self, entry: Entry, reason: str) -> None:
        """Drops a group from which nothing can be learnt, and makes room for another."""
        self._pool.pass_over(entry)
        self._admission.done(entry.group)
        logger.info("ticket %d dropped: %s", entry.group.ticket.number, reason)

    def _remove(self, version: int) -> None:
        old = self._pool.remove_older(lambda group: self.lag(group, version), self._cfg.max_lag)
        self.dropped += len(old)
        self._drop(old, "too old")
        excess = self._pool.remove_excess(self._buffer.now_s)
        self.removed += len(excess)
        self._drop(excess, "over a bound of buffer.removal")

    def _drop(self, items: Sequence[PooledGroup], reason: str) -> None:
        for item in items:
            self._admission.done(item.group)
        if items:
            tickets = ", ".join(f"{item.number} (lag {item.lag})" for item in items)
            logger.info("%d groups dropped, %s: tickets %s", len(items), reason, tickets)

    def _recover(self, version: int) -> None:
        """Acts against what can keep groups from coming: replaces tickets that were lost or quarantined, and
        admits again, at `version`, tickets that an abandoned history admitted at later versions.

        Workers claim the oldest tickets first, and start on a ticket only with weights as new as its step. If a
        resumed learner's replay gives other weights, the groups that would have led to the later versions are
        too old; workers that have claimed the later tickets would then wait for versions that depend on tickets
        behind them in the queue. While there are groups to learn from, such tickets are left alone, because
        after an exact replay the work on them counts.
        """
        if self._buffer.rewind():
            self._pool.rewind()
            logger.warning(
                "redis gives its groups smaller ids than before: their stream is read anew"
            )
        if readmitted := self._buffer.readmit(version):
            logger.info(
                "%d tickets of abandoned versions are admitted again at version %d",
                readmitted,
                version,
            )
        alive = self._buffer.open_tickets() | set(self._buffer.unread())
        self._admission.recount(alive | self._pool.numbers)

    def _lacks_room(self) -> bool:
        """Returns True if Redis is at its limit, or refuses groups well below it: it takes a group only if all
        copies of it, and of those that come in beside it, have room."""
        memory = self._buffer.memory()
        if memory.full or not memory.limit or not self._starvation.asks():
            return memory.full
        return any(worker.waiting for worker in self._buffer.workers())

    def _say_full(self) -> None:
        """Logs, once, that no checkpoint can make room in Redis."""
        if not self._said_full:
            self._said_full = True
            logger.error(
                "redis is full of groups that are not learnt from yet: its maxmemory must hold "
                "(max_lag + 1) x groups x oversampling + workers + 2 of them; waiting"
            )

    def _complaint(self) -> str:
        """Returns what the learner has waited for too long, and publishes it; "" if there is nothing to say
        now, or workers draw: long responses and evaluations take their time."""
        seconds = self._starvation.due()
        if not seconds:
            return ""
        claims, workers = self._buffer.claims(), self._buffer.workers()
        self._met_worker |= bool(workers) or self.groups > 0
        if any(worker.tokens_per_s for worker in workers):
            return ""
        self._starvation.said()
        ready, needed = len(self._pool), self._pool.needed
        message = sentence(seconds, ready, needed, claims, workers, self._met_worker)
        logger.warning(message)
        self._buffer.starves(message)
        return message
