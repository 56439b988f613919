"""How a ticket becomes responses, behind one Protocol: one turn, turns with a calculator, or a user's agent.

What a model did not draw (a tool's result, a user's message) stands in the response with loss mask 0 and
log-prob 0. Tokens are never made from text again: what was drawn stays as it was drawn.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from areal_q.config import CalculatorTool
from areal_q.errors import ConfigError
from areal_q.messages import Array, Ticket, Trajectory, VersionSpan
from areal_q.tasks import Score, Tokenizer
from areal_q.tasks.countdown import evaluate
from rollout.engines.base import Completion, Engine, Request, TokenCallback


@dataclass
class Response:
    """All that followed a ticket's prompt, turn after turn."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"
    score: Score | None = None
    """By who played the episode; None: the task's reward judges the text"""
    turns: int = 0
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
        self.finish_reason = completion.finish_reason
        self.turns += 1
        for span in completion.spans:
            self._span(span)
        if completion.routes is not None:
            # What an earlier turn had seen stays as it was when it mattered.
            seen = completion.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate((seen, completion.routes[len(seen) :]))

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
            reward_parts={**score.parts, "correct": float(score.correct)},
            routes=Array.of(self.routes) if routes and self.routes is not None else None,
        )

    def _span(self, span: VersionSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last and (last.version, last.digest) == (span.version, span.digest):
            self.spans[-1] = VersionSpan(span.version, last.tokens + span.tokens, span.digest)
        else:
            self.spans.append(span)


class Environment(Protocol):
    async def __call__(self, ticket: Ticket) -> list[Response]:
        """`group_size` responses, in order. Cancelled, it leaves nothing with the engine."""
        ...


@dataclass(frozen=True)
class SingleTurn:
    engine: Engine
    eos_id: int

    async def __call__(self, ticket: Ticket) -> list[Response]:
        completions = await self.engine.generate(
            Request(
                prompt_ids=ticket.prompt_ids.numpy(),
                num_samples=ticket.group_size,
                sampling=ticket.sampling,
                seed=ticket.seed,
                stop_ids=frozenset({self.eos_id}),
            )
        )
        responses = [Response() for _ in completions]
        for response, completion in zip(responses, completions, strict=True):
            response.add_drawn(completion)
        return responses


async def go_on(
    engine: Engine,
    ticket: Ticket,
    index: int,
    response: Response,
    stop_ids: frozenset[int],
    max_tokens: int,
    on_token: TokenCallback | None = None,
) -> Completion:
    """One more turn of `response`, added to it. Each turn draws from a stream of its own."""
    (completion,) = await engine.generate(
        Request(
            prompt_ids=np.concatenate([ticket.prompt_ids.numpy(), response.ids]).astype(np.int32),
            num_samples=1,
            sampling=msgspec.structs.replace(ticket.sampling, max_tokens=max_tokens),
            seed=ticket.seed + index + (response.turns << 32),
            stop_ids=stop_ids,
        ),
        on_token,
    )
    response.add_drawn(completion)
    return completion


class Calculator:
    """Turns until the model says that it is done, its budget is spent, or it has called too often.

    Example: `(12+34)` is followed by `46 `, mask 0, with open "(", close ")", after " ".
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, cfg: CalculatorTool) -> None:
        """Raises ConfigError unless `close` is one token."""
        self._engine, self._tokenizer, self._cfg = engine, tokenizer, cfg
        ids = tokenizer.encode(cfg.close)
        if len(ids) != 1:
            raise ConfigError(
                f"rollout.environment.close = {cfg.close!r} is {len(ids)} tokens, not one"
            )
        self._close = ids[0]

    async def __call__(self, ticket: Ticket) -> list[Response]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._play(ticket, index)) for index in range(ticket.group_size)
            ]
        return [task.result() for task in tasks]

    async def _play(self, ticket: Ticket, index: int) -> Response:
        response, calls = Response(), 0
        budget = ticket.sampling.max_tokens
        while response.drawn < budget:
            tool = {self._close} if calls < self._cfg.max_calls else set()
            stops = frozenset({self._tokenizer.eos_id, *tool})
            left = budget - response.drawn
            done = await go_on(self._engine, ticket, index, response, stops, left)
            if int(done.response_ids[-1]) != self._close or self._close not in stops:
                return response
            calls += 1
            response.add_given(self._result(response.ids), response.spans[-1])
        response.finish_reason = "length"
        return response

    def _result(self, ids: Sequence[int]) -> list[int]:
        """What the tool says to the last call in `ids`; nothing to what is none."""
        text = self._tokenizer.decode(ids).removesuffix(self._cfg.close)
        _, opened, expression = text.rpartition(self._cfg.open)
        found = evaluate(expression) if opened else None
        if found is None or found[0].denominator != 1:
            return []
        result = self._tokenizer.encode(f"{found[0]}{self._cfg.after}")
        return result if len(result) <= self._cfg.max_result_tokens else []
