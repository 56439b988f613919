"""How a ticket becomes responses, behind one Protocol: one turn, turns with a calculator, or a user's agent.

What a model did not draw (a tool's result, a user's message) stands in the response with loss mask 0 and
log-prob 0. Tokens are never made from text again: what was drawn stays as it was drawn.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from areal_q.config import CalculatorTool
from areal_q.errors import ConfigError
from areal_q.messages import (
    Array,
    FinishReason,
    PartialResponse,
    Ticket,
    Trajectory,
    VersionSpan,
)
from areal_q.tasks import Score, Tokenizer
from areal_q.tasks.datasets.countdown import evaluate
from rollout.engines.base import Completion, Engine, Request, TokenCallback


@dataclass
class Response:
    """All that followed a ticket's prompt, turn after turn."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    """Of its last turn"""
    score: Score | None = None
    """By who played the episode; None: the task's reward judges the text"""
    turns: int = 0
    """That have come to their end"""
    pending: int = 0
    """Tokens of a turn that was cut off, by the end of a worker, and is to go on"""
    ended: bool = False
    routes: np.ndarray | None = None
    """As in Completion: of all tokens that the engine was given, turn after turn"""

    @property
    def drawn(self) -> int:
        """Tokens that the model drew"""
        return sum(self.mask)

    def add_drawn(self, completion: Completion) -> None:
        self.ids += completion.response_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.mask += [1] * len(completion.response_ids)
        for span in completion.spans:
            self._span(span)
        if completion.routes is not None:
            # What an earlier turn had seen stays as it was when it mattered.
            seen = completion.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate((seen, completion.routes[len(seen) :]))
        if completion.finish_reason is None:
            self.pending += len(completion.response_ids)
        else:
            self.finish_reason = completion.finish_reason
            self.turns, self.pending = self.turns + 1, 0

    def add_given(self, ids: Sequence[int], version: VersionSpan) -> None:
        """Tokens that nobody drew; `version` says at which weights they came."""
        if not ids:
            return
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self._span(VersionSpan(version.version, len(ids), version.digest))

    def trajectory(self, index: int, score: Score, *, routes: bool = False) -> Trajectory:
        """The record of it; with `routes`, if the engine told them."""
        return Trajectory(
            index=index,
            response_ids=Array.of(self.ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
            reward=score.reward,
            reward_parts={**score.parts, "correct": float(score.correct)} if score.valid else {},
            valid=score.valid,
            failure=score.failure,
            routes=Array.of(self.routes) if routes and self.routes is not None else None,
        )

    def partial(self) -> PartialResponse:
        return PartialResponse(
            response_ids=Array.of(self.ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
            turns=self.turns,
            pending=self.pending,
            ended=self.ended,
            routes=None if self.routes is None else Array.of(self.routes),
        )

    @classmethod
    def of(cls, partial: PartialResponse) -> "Response":
        return cls(
            ids=partial.response_ids.numpy().tolist(),
            logprobs=partial.behavior_logprobs.numpy().tolist(),
            mask=partial.loss_mask.numpy().tolist(),
            spans=list(partial.spans),
            finish_reason=partial.finish_reason,
            turns=partial.turns,
            pending=partial.pending,
            ended=partial.ended,
            routes=None if partial.routes is None else partial.routes.numpy(),
        )

    def _span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.version, last.digest) == (span.version, span.digest):
            self.spans[-1] = VersionSpan(span.version, last.tokens + span.tokens, span.digest)
        else:
            self.spans.append(span)


class Environment(Protocol):
    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        """Plays each of the ticket's `group_size` responses to its end, in place: empty ones, and those that
        another worker had begun. Cancelled, it leaves nothing with the engine, and in `responses` all that
        was drawn."""
        ...


@dataclass(frozen=True)
class Player:
    """How an environment asks its engine."""

    engine: Engine
    tokenizer: Tokenizer
    timeout_s: float = 0.0
    """Of every request; 0: none"""

    async def group(self, ticket: Ticket, responses: list[Response]) -> None:
        """One turn of all responses, none of which has begun: the prompt is computed once."""

        def take(index: int, completion: Completion) -> None:
            responses[index].add_drawn(completion)
            responses[index].ended = completion.finish_reason is not None

        await self.engine.generate(
            Request(
                prompt_ids=ticket.prompt_ids.numpy(),
                num_samples=ticket.group_size,
                sampling=ticket.sampling,
                seed=ticket.seed,
                stop_ids=frozenset({self.tokenizer.eos_id}),
                decode=self.tokenizer.decode,
                timeout_s=self.timeout_s,
            ),
            on_response=take,
        )

    async def turn(
        self,
        ticket: Ticket,
        index: int,
        response: Response,
        stop_ids: frozenset[int],
        max_tokens: int,
        then: Callable[[Completion], None] = lambda completion: None,
        stop: tuple[str, ...] = (),
        on_token: TokenCallback | None = None,
    ) -> Completion:
        """One more turn of `response`, or the rest of one that was cut off, added to it. Each turn draws from
        a stream of its own. `then`: told that the turn has ended, before anything can be cancelled;
        `stop`: strings besides the ticket's."""
        sampling = ticket.sampling

        def take(_: int, completion: Completion) -> None:
            response.add_drawn(completion)
            if completion.finish_reason is not None:
                then(completion)

        (completion,) = await self.engine.generate(
            Request(
                prompt_ids=np.concatenate([ticket.prompt_ids.numpy(), response.ids]).astype(
                    np.int32
                ),
                num_samples=1,
                sampling=replace(sampling, max_tokens=max_tokens, stop=(*sampling.stop, *stop)),
                seed=ticket.seed + index + (response.turns << 32),
                stop_ids=stop_ids,
                decode=self.tokenizer.decode,
                drawn=response.pending,
                timeout_s=self.timeout_s,
            ),
            on_token,
            take,
        )
        return completion


@dataclass(frozen=True)
class SingleTurn:
    player: Player

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        if not any(response.ids for response in responses):
            await self.player.group(ticket, responses)
            return
        async with asyncio.TaskGroup() as group:
            for index, response in enumerate(responses):
                if not response.ended:
                    group.create_task(self._rest(ticket, index, response))

    async def _rest(self, ticket: Ticket, index: int, response: Response) -> None:
        def end(completion: Completion) -> None:
            response.ended = True

        left = ticket.sampling.max_tokens - len(response.ids)
        stops = frozenset({self.player.tokenizer.eos_id})
        await self.player.turn(ticket, index, response, stops, left, end)


class Calculator:
    """Turns until the model says that it is done, its budget is spent, or it has called too often.

    Example: `(12+34)` is followed by `46 `, mask 0, with open "(", close ")", after " ".
    """

    def __init__(self, player: Player, cfg: CalculatorTool) -> None:
        """Raises ConfigError unless `close` is one token."""
        self._player, self._tokenizer, self._cfg = player, player.tokenizer, cfg
        ids = self._tokenizer.encode(cfg.close)
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.environment.close = {cfg.close!r} is {len(ids)} tokens, not one"
            )
        self._close = ids[0]

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        async with asyncio.TaskGroup() as group:
            for index, response in enumerate(responses):
                if not response.ended:
                    group.create_task(self._play(ticket, index, response))

    async def _play(self, ticket: Ticket, index: int, response: Response) -> None:
        budget = ticket.sampling.max_tokens
        while not response.ended and response.drawn < budget:
            # Every turn before this one was a call.
            tool = {self._close} if response.turns < self._cfg.max_calls else set()
            stops = frozenset({self._tokenizer.eos_id, *tool})
            after = partial(self._after, response, stops)
            left = budget - response.drawn
            await self._player.turn(ticket, index, response, stops, left, after)
        if not response.ended:
            response.finish_reason, response.ended = "length", True

    def _after(self, response: Response, stops: frozenset[int], done: Completion) -> None:
        called = int(done.response_ids[-1]) == self._close and self._close in stops
        if called and done.finish_reason != "timeout":
            response.add_given(self._result(response.ids), response.spans[-1])
        else:
            response.ended = True

    def _result(self, ids: Sequence[int]) -> list[int]:
        """What the tool says to the last call in `ids`; nothing to what is none."""
        text = self._tokenizer.decode(ids).removesuffix(self._cfg.close)
        _, opened, expression = text.rpartition(self._cfg.open)
        found = evaluate(expression) if opened else None
        if found is None or found[0].denominator != 1:
            return []
        result = self._tokenizer.encode(f"{found[0]}{self._cfg.after}")
        return result if len(result) <= self._cfg.max_result_tokens else []
