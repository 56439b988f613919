"""The always-on rollout worker.

    Redis tickets ──claim──▶ [in flight: one task a ticket] ──engine──▶ score ──commit──▶ Redis groups
                                        ▲
    learner ──ZeroMQ──▶ subscriber thread ┴─ swap: new weights between two decoding steps

| loop    | waits for                              | unblocked by                                  |
|---------|----------------------------------------|-----------------------------------------------|
| _claim  | the first weights                      | _swap                                         |
|         | room for a group, then a ticket        | ended responses; admission; a dead worker     |
| _handle | weights as new as the ticket           | _swap                                         |
|         | the engine; then a slow reward         | the last token of the group; its timeout      |
|         | Redis                                  | the commit                                    |
| _swap   | a complete, verified version           | the subscriber thread                         |
| _beat   | the heartbeat interval                 | time                                          |
| LoopLag | its own interval                       | time                                          |

The worker never waits for the learner, since tickets admitted ahead keep the engine full while the learner
trains. It does not wait for the last response of a group either: only responses that have not ended count
against its capacity, so that new groups use the rows of those that have.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from areal_q.config import Run, ScriptedEngine
from areal_q.errors import RecordError, WeightVersionError
from areal_q.evaluation.benchmarks import preset_of
from areal_q.messages import LONGEST_NAME, Group, Manifest, PartialGroup, WorkerStatus
from areal_q.system.command import escaped
from areal_q.system.stop_request import unbroken
from areal_q.tasks import Tokenizer, build_reward
from buffer.redis_store import Claim, WorkerBuffer
from buffer.weight_sync import WeightSource, WeightSubscriber
from rollout.engines.base import Engine
from rollout.environments.base import Environment, Response, scored, with_shared_prompt
from rollout.loop_lag import LoopLag

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0
RATE_BEATS = 10
"""Heartbeats over which a heartbeat's rates are, since a step of a large model takes longer than one"""
_SAY_AFTER_S = 10.0
"""Seconds of waiting after which a worker logs what it waits for"""
CAPACITY_POLL_S = 0.05
"""Seconds between two checks for capacity that ended responses of unfinished groups have freed"""


EVALUATION_SHARE = 0.125
"""Share of a worker's capacity that evaluation tickets may take from training tickets that wait. With all of it
a learner would wait as long as an evaluation takes; without any, an evaluation as long as there is training.
Chosen: the quickstart in bfloat16 made 8.7 steps/s with an eighth, its evaluations included, and 7.5 with a
quarter and training tickets admitted last. One that is more than `max_lag` versions late goes first, since
newer weights are not what it is to measure; it counts for no best version (learner/heldout_eval.py)."""
MOST_REFUSED = 100
"""Number of tickets in a row that go to the quarantine, or of versions that are refused, before the worker
gives up"""


class WorkerCapacity(NamedTuple):
    """Bounds on what a worker claims."""

    responses: int
    """Most responses that have not ended: as many as fill the engine, and a reserve"""
    slots: int
    """Number of rows in the engine"""
    group_size: int
    """Number of responses to each training ticket"""
    evaluated: int = 1
    """Most responses to an evaluation ticket"""

    @property
    def largest(self) -> int:
        """Most responses to a ticket of either kind."""
        return max(self.group_size, self.evaluated)

    @classmethod
    def of(cls, run: Run) -> Self:
        """Returns enough responses to fill the engine and a quarter more, and at least two groups."""
        engine, size = run.rollout.engine, run.learner.group_size
        slots = 256 if isinstance(engine, ScriptedEngine) else engine.slots
        sets = run.eval.sets.items()
        asked = [preset_of(one, f"eval.sets.{name}.preset").samples for name, one in sets]
        return cls(max(2 * size, slots * 5 // 4), slots, size, max([1, *asked]))


@dataclass
class GroupInFlight:
    """A claimed ticket and its responses so far."""

    claim: Claim
    responses: list[Response]

    @property
    def open(self) -> int:
        """Number of responses that have not ended. A group that waits for a reward or for Redis counts in full,
        so that the number of such groups is bounded."""
        return sum(not r.ended for r in self.responses) or len(self.responses)

    def partial(self) -> PartialGroup | None:
        if not any(r.ids for r in self.responses):
            return None
        number = self.claim.ticket.number
        return PartialGroup(ticket=number, responses=[r.partial() for r in self.responses])


class Worker:
    """Keeps `engine` full of tickets until it is cancelled. It then gives back the tickets that it has claimed,
    with the tokens drawn for them, so that another worker continues from there."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        buffer: WorkerBuffer,
        subscriber: WeightSubscriber,
        tokenizer: Tokenizer,
        environment: Environment,
        run: Run,
        run_id: str = "",
        observe: Callable[[dict[str, Any]], None] = lambda status: None,
        source: WeightSource | None = None,
        capacity: WorkerCapacity | None = None,
    ) -> None:
        self.name, self._run, self._run_id = name, run, run_id
        self._engine, self._buffer, self._subscriber = engine, buffer, subscriber
        self._tokenizer, self._environment = tokenizer, environment
        self._reward = build_reward(run)
        self._observe = observe
        """Function that is called with the worker's status at every heartbeat"""
        self._source = source or WeightSource()
        self._capacity = capacity or WorkerCapacity.of(run)
        self._max_lag = run.learner.max_lag
        """Largest version lag of another worker's tokens with which this worker continues a response"""
        self._in_flight: dict[asyncio.Task[None], GroupInFlight] = {}
        self._committing: set[asyncio.Task[None]] = set()
        """Tasks that are committing their group. The commit itself reports a lost ticket; for these tasks a
        failed renewal of the claim means nothing, since a commit removes the claim too."""
        self._place_free, self._swapped = asyncio.Event(), asyncio.Event()
        self._groups = self._timeouts = self._resumed = self._swaps = 0
        self._refused = 0
        """Number of tickets in a row that did not become a valid group"""
        self._refused_weights = self._refused_in_a_row = 0
        """Number of versions that the engine could not use: all, and since the last one that it could"""
        self._swap_s = 0.0
        self._loading = False
        self._loaded: Manifest | None = None
        self._lag = LoopLag()
        self._waits = ("", 0.0, False)
        """What the worker waits for, since when in monotonic seconds, and whether it has been logged"""

    async def run(self, begin: Callable[[], Awaitable[object]] | None = None) -> None:
        """Works until cancelled. `begin` is awaited as soon as the engine takes requests. Any error of a loop
        is raised, in an ExceptionGroup, since a worker that cannot work must not look alive."""
        try:
            await self._reward.start()
            await self._environment.start()
            await self._engine.start()
            if begin:
                await begin()
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._swap())
                loops.create_task(self._claim(loops))
                loops.create_task(self._beat())
                loops.create_task(self._lag.watch())
        except asyncio.CancelledError:  # a further signal breaks off what the first one began
            await self._close()
            raise
        except BaseException:
            await unbroken(self._close())
            raise

    async def _close(self) -> None:
        await self._engine.close()
        await self._reward.close()
        await self._environment.close()
        works = self._in_flight.values()
        await self._buffer.leave([replace(w.claim, partial=w.partial()) for w in works])

    async def _claim(self, loops: asyncio.TaskGroup) -> None:
        # A worker without weights (its relay may be empty) must not claim tickets that others could use.
        await self._until_version(0)
        while True:
            free = self._capacity.responses - sum(work.open for work in self._in_flight.values())
            if free < self._capacity.group_size:
                self._place_free.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CAPACITY_POLL_S):
                        await self._place_free.wait()
                continue
            works = [w for w in self._in_flight.values() if w.claim.ticket.purpose == "eval"]
            oldest = self._engine.version - self._max_lag
            late = any(work.claim.ticket.step < oldest for work in works)
            share = max(1, int(EVALUATION_SHARE * self._capacity.responses))
            share -= sum(work.open for work in works)
            # Which tickets there are is not known: any may be for as many responses as the largest.
            count = free // self._capacity.largest
            if share > 0 and not late:
                count = min(count, share // self._capacity.evaluated)
            training_first = share <= 0 and not late
            claims = await self._buffer.claim(
                max(1, count), block_s=1.0, training_first=training_first
            )
            for claim in claims:
                work = GroupInFlight(claim, [Response() for _ in range(claim.ticket.group_size)])
                self._in_flight[loops.create_task(self._handle(work))] = work

    async def _handle(self, work: GroupInFlight) -> None:
        """Turns a claimed ticket into a committed group. When cancelled, it leaves the ticket for `run` to give
        back. A ticket that cannot become a valid group goes to the quarantine. Raises RecordError after
        MOST_REFUSED of them in a row, since then the weights or the worker are at fault."""
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._make(work, task)
            self._refused = 0
        except* RecordError as errors:
            self._refused += 1
            reason = first_error(errors)
            if self._refused >= MOST_REFUSED:
                raise RecordError(
                    f"gives up: {self._refused} tickets in a row became no group, the last one: {reason}"
                ) from None
            await self._buffer.quarantine(work.claim, str(reason))
        self._in_flight.pop(task, None)
        self._place_free.set()

    async def _make(self, work: GroupInFlight, task: asyncio.Task[None]) -> None:
        """Draws, scores and commits the group. Raises RecordError if it is not valid."""
        claim, ticket = work.claim, work.claim.ticket
        # Admission assumes weights no older than the ticket; drawn with older ones, the group could exceed the
        # largest version lag by the time it is trained on.
        await self._until_version(ticket.step)
        started = time.time()
        self._take_up(work)
        await self._environment(ticket, work.responses)
        # Before the ends of prompts that differ begin their responses: rewards judge the reply.
        scores = await scored(self._reward, ticket, work.responses, self._tokenizer)
        ticket, responses = with_shared_prompt(ticket, work.responses)
        self._timeouts += sum(r.finish_reason == "timeout" for r in responses)
        wanted = self._run.learner.routing_replay and ticket.purpose == "train"
        pairs = zip(responses, scores, strict=True)
        group = Group(
            ticket=ticket,
            worker=self.name,
            engine=self._engine.name,
            weight_format=self._run.rollout.format,
            trajectories=[r.trajectory(i, s, routes=wanted) for i, (r, s) in enumerate(pairs)],
            started_s=started,
            finished_s=time.time(),
        )
        self._committing.add(task)
        task.add_done_callback(self._committing.discard)
        if await self._buffer.commit(claim, group):
            self._groups += 1
        else:
            logger.warning("ticket %d was taken over; its group is discarded", ticket.number)

    async def _until_version(self, version: int) -> None:
        while self._engine.version < version:
            self._swapped.clear()
            await self._swapped.wait()

    def _take_up(self, work: GroupInFlight) -> None:
        """Continues another worker's responses, unless their tokens are too old, of weights that have not
        arrived here yet, or of another vocabulary."""
        newest, vocabulary = self._engine.version, self._tokenizer.vocab_size
        partial = work.claim.partial
        for index, half in enumerate(partial.responses if partial else []):
            versions = [span.version for span in half.spans]
            if not versions or half.response_ids.numpy().max() >= vocabulary:
                continue
            if newest - self._max_lag <= min(versions) and max(versions) <= newest:
                work.responses[index] = Response.of(half)
                self._resumed += 1

    async def _swap(self) -> None:
        while True:
            self._loading = False
            weights = await self._subscriber.wait()
            self._loading = True
            try:
                self._swap_s += await self._engine.load_weights(weights)
            except WeightVersionError as error:
                self._refuse_weights(error)
                continue
            self._swaps += 1
            self._refused_in_a_row = 0
            self._loaded = weights.manifest
            self._swapped.set()

    def _refuse_weights(self, error: WeightVersionError) -> None:
        """Goes on with the weights that the engine has. Raises RecordError if it has none, as no later version
        may come, and after MOST_REFUSED versions in a row, since the engine's own may be the wrong ones."""
        self._refused_weights += 1
        self._refused_in_a_row += 1
        reason = escaped(" ".join(str(error).split()))
        if self._engine.version < 0:
            raise RecordError(f"gives up: the first weights were refused: {reason}")
        if self._refused_in_a_row >= MOST_REFUSED:
            raise RecordError(
                f"gives up: {self._refused_in_a_row} versions in a row were refused, the last one: {reason}"
            )
        logger.warning("weights refused, version %d goes on: %s", self._engine.version, reason)

    @property
    def _digest(self) -> str:
        """The digest of the engine's weights; "" for the moment in which a swap has just been done."""
        loaded = self._loaded
        return loaded.digest if loaded and loaded.version == self._engine.version else ""

    def _waits_for(self, now_s: float) -> str:
        """Returns what the engine waits for, or "" if it has work. A wait that lasts is logged, only once."""
        found = self._hindrance()
        what, since_s, said = self._waits
        if found != what:
            self._waits = (found, now_s, False)
        elif found and not said and now_s - since_s >= _SAY_AFTER_S:
            logger.info("waits for %s", found)
            self._waits = (what, since_s, True)
        return found

    def _hindrance(self) -> str:
        if self._engine.version < 0:
            if self._loading:  # vLLM and SGLang start from the first weights, which takes a minute
                return f"engine {self._engine.name}, which starts"
            return f"the first weights of run {self._buffer.keys.run}"
        if self._buffer.waiting:
            return "room in Redis"
        if self._engine.active:
            return ""
        if not self._in_flight:
            return "tickets"
        steps = [work.claim.ticket.step for work in self._in_flight.values()]
        ahead = [step for step in steps if step > self._engine.version]
        if ahead:
            return f"version {min(ahead)}, with version {self._engine.version}"
        played = self._environment
        if not played.at_endpoint:
            return ""
        return f"agents, with {played.open} of {played.unfinished} episodes open"

    def _abandon(self, lost: list[Claim]) -> None:
        """Stops generating for tickets that another worker has taken over."""
        generating = self._in_flight.keys() - self._committing
        for task in [task for task in generating if self._in_flight[task].claim in lost]:
            number = self._in_flight.pop(task).claim.ticket.number
            logger.warning("ticket %d was taken over", number)
            task.cancel()
            self._place_free.set()

    async def _beat(self) -> None:
        """Sends heartbeats and renews the worker's claims, so that no other worker takes them over."""
        counts = deque([(time.monotonic(), 0, 0.0)], maxlen=RATE_BEATS)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._abandon(await self._buffer.renew([w.claim for w in self._in_flight.values()]))
            await self._buffer.run.check()
            if self._subscriber.silent:
                info = await self._buffer.run_info()
                self._subscriber.follow(*self._source.endpoints(info.endpoints))
            now = time.monotonic(), self._engine.tokens_drawn, self._engine.busy_s
            status = self._status(counts[0], now)
            counts.append(now)
            self._observe(msgspec.structs.asdict(status))
            await self._buffer.heartbeat(status)

    def _status(
        self, then: tuple[float, int, float], now: tuple[float, int, float]
    ) -> WorkerStatus:
        """Returns what a heartbeat says, with rates between two times: each (seconds of the monotonic clock,
        tokens drawn, seconds busy)."""
        (then_s, tokens_then, busy_then_s), (now_s, tokens, busy_s) = then, now
        span_s = now_s - then_s
        # Of a user's code, or of whoever plays: it may be any text.
        failure = " ".join((self._reward.failure or self._environment.failure).split())
        return WorkerStatus(
            worker=self.name,
            pid=os.getpid(),
            version=self._engine.version,
            active=self._engine.active,
            tokens=tokens,
            busy_s=busy_s,
            tokens_per_s=(tokens - tokens_then) / span_s,
            idle_share=max(0.0, 1 - (busy_s - busy_then_s) / span_s),
            loop_lag_s=self._lag.p99_s,
            loop_lag_max_s=self._lag.max_s,
            groups=self._groups,
            swaps=self._swaps,
            refused_weights=self._refused_weights,
            swap_s=self._swap_s / max(1, self._swaps),
            time_s=time.time(),
            waiting=self._buffer.waiting,
            full_s=self._buffer.full_s,
            digest=self._digest,
            behind_s=self._subscriber.behind_s,
            stalls=self._subscriber.stats.stalls,
            slots=self._capacity.slots,
            timeouts=self._timeouts,
            resumed=self._resumed,
            run_id=self._run_id,
            waits_for=self._waits_for(now_s),
            failure=escaped(failure)[: 2 * LONGEST_NAME],
            episodes=self._environment.unfinished,
            open_episodes=self._environment.open,
        )


def first_error(errors: BaseExceptionGroup[Exception]) -> BaseException:
    """Returns the first error in `errors` that is not itself a group, at any depth."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
