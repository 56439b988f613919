"""Admission of prompts to generation, so that nothing is generated that would be too old to learn from.

With B groups a step and a bound of η versions, at most (version + η + 1) · B groups may have been admitted
when the learner is at `version` (AReaL, arXiv 2505.24298). A step consumes B groups, so this means that at most
(η + 1) · B groups (LearnerConfig.max_outstanding) are outstanding: admitted, and neither finished nor dropped.
A dropped group makes room for another one.

Where many are dropped, ηB ready ones may have fewer than B to learn from, and the learner waits for others:
`learner.oversampling` admits that many times as many. What is too old when its turn comes is dropped.

In Reverb's vocabulary this is the rate limiter, a Queue of that size: an insert waits while so many
groups are outstanding, a sample waits until the sampler has B (or `min_groups`) to choose from. Admission acts
on tickets, before any work is done, while Reverb's limiter acts on finished items. A group that may be used K
times is outstanding until its K-th use or until it is too old, so that samples per insert are K at most.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from areal_q.config import (
    External,
    PythonEnvironment,
    Run,
    SingleTurn,
)
from areal_q.errors import BufferFull, RecordError
from areal_q.messages import Array, Group, Ticket
from areal_q.tasks import Problem, Task, Tokenizer
from areal_q.tasks.ordering.order import Chosen, Order
from areal_q.tasks.ordering.pass_rates import PoolsState
from buffer.redis_store import LearnerBuffer
from learner.data.eval_sets import EvaluationSet, evaluation_sets

logger = logging.getLogger(__name__)


class Admission:
    """Admits training tickets within the bound, and evaluation tickets without one.

    Example: groups = 64, max_lag = 2: 192 tickets at version 0, then 64 more after every step.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        tokenizer: Tokenizer,
        buffer: LearnerBuffer,
        cursor: int,
        outstanding: set[int],
        lost: set[int] | None = None,
        order: Mapping[str, PoolsState] | None = None,
        own_sets: Mapping[str, Sequence[Problem]] | None = None,
    ) -> None:
        """`order` is the state of the order in a checkpoint, `own_sets` has the problems of the evaluation sets
        that have their own. Raises ConfigError as `evaluation_sets` does."""
        self._run, self._buffer = run, buffer
        self._task, self._tokenizer = task, tokenizer
        self.cursor = cursor
        """Number of the next ticket."""
        self.outstanding = outstanding
        """Numbers of the tickets that were admitted and are neither finished nor dropped."""
        self.lost = lost or set()
        """Numbers of tickets that can no longer become groups; others were admitted in their place."""
        self.order = Order(run.learner.order, task.train, run.seed, order)
        """Chooses the problem of each ticket."""
        self.sets = evaluation_sets(run.eval, run.rollout.sampling, task, own_sets or {})
        self.refused = 0
        """Number of admissions that were postponed because Redis was full."""

    @property
    def episodes(self) -> bool:
        """True if agents, or an environment of several turns, play what is asked."""
        return not isinstance(self._run.rollout.environment, SingleTurn)

    @property
    def capacity_left(self) -> int:
        """Groups that may be admitted now: (η + 1) · B · oversampling − outstanding."""
        return self._run.learner.max_outstanding - len(self.outstanding)

    def admit(self, version: int) -> int:
        """Admits tickets up to the capacity left; returns their number, which is 0 while Redis is full."""
        numbers = range(self.cursor, self.cursor + max(0, self.capacity_left))
        try:
            self.issue(numbers, version)
        except BufferFull as error:
            if not self.refused:
                logger.warning("admission waits for room: %s", error)
            self.refused += 1
            return 0
        return len(numbers)

    def issue(self, numbers: range | list[int], version: int) -> None:
        """Puts tickets into the buffer: new ones, or those that were lost with Redis. Raises BufferFull if
        there is no room for all of them, and then it puts none there."""
        cursor = max([self.cursor, *(n + 1 for n in numbers)])
        if numbers:
            self._buffer.admit([self.ticket(n, version) for n in numbers], cursor)
        self.cursor = cursor
        self.outstanding.update(numbers)

    def expects(self, number: int) -> bool:
        """Returns True if a group of this ticket counts, because the ticket is outstanding, or was lost and
        admitted again. Any other ticket is finished, and came back from a Redis that lost its last seconds."""
        if number in self.lost:
            self.lost.remove(number)
            self.outstanding.add(number)
        return number in self.outstanding

    def check(self, group: Group) -> None:
        """Raises RecordError if the ticket of `group` is not the one that this run admits under its number, at
        whatever step: the learner computes on the ticket that came back with the responses."""
        found = group.ticket
        if found.purpose == "train":
            admitted = self._train_ticket(self.order.admitted(found), found.number, found.step)
        else:
            admitted = self._eval_ticket(self.set_of(found), found.number, found.step)
        # A run keeps its tickets under another name, or another version of this program.
        # An agent, or an environment with tools, may put another prompt before its first turn.
        own = isinstance(self._run.rollout.environment, External | PythonEnvironment)
        free = ["schema", "run", "run_id", *["prompt_ids"] * own]
        same = {name: getattr(found, name) for name in free}
        if replace(admitted, **same) != found:
            raise RecordError(f"group of ticket {found.number}: its ticket is not the one admitted")

    def done(self, group: Group) -> None:
        """Ends the ticket of `group`, which is finished or dropped, and so makes room for another."""
        if group.ticket.number in self.outstanding:
            self.outstanding.remove(group.ticket.number)
            self.order.done(group)

    def recount(self, alive: set[int]) -> None:
        """Ends all tickets but those in `alive`, as no others can become groups any more."""
        lost = self.outstanding - alive
        if lost:
            logger.warning("%d tickets came to nothing; their places are refilled", len(lost))
        self.order.lost(lost)
        self.outstanding &= alive
        self.lost |= lost

    def evaluate(self, version: int, sets: Sequence[EvaluationSet] | None = None) -> int:
        """Admits tickets for the problems of these sets, by default all; returns their number."""
        tickets = [
            self._eval_ticket(one, one.first + place, version)
            for one in (self.sets if sets is None else sets)
            for place in range(len(one.problems))
        ]
        self._buffer.admit_eval(tickets)
        return len(tickets)

    def set_of(self, ticket: Ticket) -> EvaluationSet:
        """Returns the set that an evaluation ticket asks a problem of. Raises RecordError if there is none."""
        for one in self.sets:
            if one.first <= ticket.number < one.first + len(one.problems):
                return one
        raise RecordError(f"group of ticket {ticket.number}: there is no such held-out problem")

    def _eval_ticket(self, one: EvaluationSet, number: int, version: int) -> Ticket:
        return self._ticket_for(
            one.problems[number - one.first],
            number,
            version,
            purpose="eval",
            group_size=one.samples,
            sampling=one.sampling,
        )

    def ticket(self, number: int, version: int) -> Ticket:
        """Returns the training ticket `number`, admitted at `version`."""
        return self._train_ticket(self.order.chosen(number), number, version)

    def _train_ticket(self, chosen: Chosen, number: int, version: int) -> Ticket:
        return self._ticket_for(
            chosen.problem,
            number,
            version,
            purpose="train",
            group_size=self._run.learner.group_size,
            sampling=self._run.rollout.sampling,
            problem=chosen.place,
            why=chosen.why,
        )

    def _ticket_for(self, asked: Problem, number: int, version: int, **fields) -> Ticket:
        return asked.ticket(
            run=self._run.name,
            run_id=self._buffer.run_id,
            number=number,
            step=version,
            prompt_ids=Array.of(self._tokenizer.encode_prompt(asked.asked), "int32"),
            seed=ticket_seed(self._run.seed, number),
            **fields,
        )


def ticket_seed(run_seed: int, number: int) -> int:
    """Returns a ticket's seed in [0, 2^62), a hash of the run's seed and the ticket's number."""
    digest = hashlib.blake2b(f"{run_seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
