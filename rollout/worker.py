"""The always-on rollout worker.

    Redis tickets ──claim──▶ [in flight: one task a ticket] ──engine──▶ score ──commit──▶ Redis groups
                                        ▲
    learner ──ZeroMQ──▶ receiver thread ┴─ swap: new weights between two decoding steps

| loop    | waits for                              | unblocked by                                  |
|---------|----------------------------------------|-----------------------------------------------|
| _claim  | a free place, then a ticket            | a finished ticket; admission; a dead worker   |
| _handle | weights as new as the ticket           | _swap                                         |
|         | the engine; then a slow reward         | the last token of the group; its timeout      |
|         | Redis                                  | the commit                                    |
| _swap   | a complete, verified version           | the receiver thread                           |
| _beat   | the heartbeat interval                 | time                                          |

It never waits for the learner: while the learner trains, tickets admitted ahead keep the engine full.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from areal_q.messages import Group, Ticket, Trajectory, WorkerStatus
from areal_q.tasks import Problem, Reward, Tokenizer
from buffer.redis_buffer import Claim, WorkerBuffer
from rollout.engines.base import Engine
from rollout.environments import Environment, Response, SingleTurn
from rollout.receiver import Receiver
from rollout.source import Source

logger = logging.getLogger(__name__)
HEARTBEAT_S = 1.0


class Worker:
    """Keeps `engine` full of tickets until it is cancelled; then hands back what it had claimed."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        buffer: WorkerBuffer,
        receiver: Receiver,
        tokenizer: Tokenizer,
        reward: Reward,
        weight_format: str,
        max_groups: int,
        observe: Callable[[dict[str, Any]], None] = lambda status: None,
        source: Source | None = None,
        environment: Environment | None = None,
        evaluation: Environment | None = None,
        routes: bool = False,
    ) -> None:
        self.name = name
        self._engine, self._buffer, self._receiver = engine, buffer, receiver
        self._tokenizer, self._reward, self._format = tokenizer, reward, weight_format
        self._observe = observe
        """Told every heartbeat"""
        self._source = source or Source()
        single = SingleTurn(engine, tokenizer.eos_id)
        self._environments = {"train": environment or single, "eval": evaluation or single}
        """By the ticket's purpose"""
        self._routes = routes
        """Whether the learner wants to know the experts that tokens were sent to"""
        self._max_groups = max_groups
        """Tickets in flight: what fills the engine, and one batch of reserve"""
        self._claims: dict[asyncio.Task[None], Claim] = {}
        self._committing: set[asyncio.Task[None]] = set()
        """Their commit tells by itself whether the ticket was lost; a renewal cannot: it is gone either way"""
        self._place_free = asyncio.Event()
        self._swapped = asyncio.Event()
        self._groups = 0
        self._swaps = 0
        self._swap_s = 0.0
        self._digest = ""

    async def run(self) -> None:
        """Until cancelled. Raises what a loop raises: a worker that cannot work must not look alive."""
        await self._reward.start()
        await self._engine.start()
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._swap())
                loops.create_task(self._claim(loops))
                loops.create_task(self._beat())
        finally:
            await self._engine.close()
            await self._reward.close()
            await self._buffer.release(list(self._claims.values()))

    async def _claim(self, loops: asyncio.TaskGroup) -> None:
        while True:
            room = self._max_groups - len(self._claims)
            if room <= 0:
                self._place_free.clear()
                await self._place_free.wait()
                continue
            for claim in await self._buffer.claim(room, block_s=1.0):
                self._claims[loops.create_task(self._handle(claim))] = claim

    async def _handle(self, claim: Claim) -> None:
        """From ticket to committed group. Cancelled, it leaves its claim for `run` to release."""
        ticket = claim.ticket
        # Admission counted on weights no older than the ticket; with older ones the group could be
        # too old when its turn comes.
        while self._engine.version < ticket.step:
            self._swapped.clear()
            await self._swapped.wait()
        started = time.time()
        responses = await self._environments[ticket.purpose](ticket)
        group = Group(
            ticket=ticket,
            worker=self.name,
            engine=self._engine.name,
            weight_format=self._format,
            trajectories=await asyncio.gather(
                *(self._trajectory(ticket, i, r) for i, r in enumerate(responses))
            ),
            started_s=started,
            finished_s=time.time(),
        )
        task = asyncio.current_task()
        assert task is not None
        self._committing.add(task)
        task.add_done_callback(self._committing.discard)
        if await self._buffer.commit(claim, group):
            self._groups += 1
        else:
            logger.warning("ticket %d was taken over; its group is discarded", ticket.number)
        del self._claims[task]
        self._place_free.set()

    async def _trajectory(self, ticket: Ticket, index: int, response: Response) -> Trajectory:
        score = response.score
        if score is None:
            text = self._tokenizer.decode([i for i in response.ids if i != self._tokenizer.eos_id])
            problem = Problem(ticket.prompt, ticket.answer)
            score = await self._reward(problem, text, response.drawn)
        wanted = self._routes and ticket.purpose == "train"
        return response.trajectory(index, score, routes=wanted)

    async def _swap(self) -> None:
        while True:
            weights = await self._receiver.wait()
            self._swap_s += await self._engine.load_weights(weights)
            self._swaps += 1
            self._digest = weights.manifest.digest
            self._swapped.set()

    def _abandon(self, lost: list[Claim]) -> None:
        """Stops generating for tickets that another worker has taken over."""
        generating = self._claims.keys() - self._committing
        for task in [task for task in generating if self._claims[task] in lost]:
            logger.warning("ticket %d was taken over", self._claims.pop(task).ticket.number)
            task.cancel()
            self._place_free.set()

    async def _beat(self) -> None:
        """Tells that it lives, and keeps its claims from being taken over."""
        engine = self._engine
        last_s, last_tokens, last_busy = time.monotonic(), 0, 0.0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now_s = time.monotonic()
            span_s = now_s - last_s
            self._abandon(await self._buffer.renew(list(self._claims.values())))
            if self._receiver.silent:
                _, endpoints = await self._buffer.run_info()
                self._receiver.follow(*self._source.endpoints(endpoints))
            status = WorkerStatus(
                worker=self.name,
                pid=os.getpid(),
                version=engine.version,
                active=engine.active,
                tokens=engine.tokens_drawn,
                tokens_per_s=(engine.tokens_drawn - last_tokens) / span_s,
                idle_share=max(0.0, 1 - (engine.busy_s - last_busy) / span_s),
                groups=self._groups,
                swaps=self._swaps,
                swap_s=self._swap_s / max(1, self._swaps),
                time_s=time.time(),
                waiting=self._buffer.waiting,
                full_s=self._buffer.full_s,
                digest=self._digest,
                behind_s=self._receiver.behind_s,
                stalls=self._receiver.stats.stalls,
            )
            self._observe(msgspec.structs.asdict(status))
            await self._buffer.heartbeat(status)
            last_s, last_tokens, last_busy = now_s, engine.tokens_drawn, engine.busy_s
