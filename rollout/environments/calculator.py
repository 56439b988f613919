"""The environment in which the model may call a calculator between two turns."""

import asyncio
from collections.abc import Sequence
from functools import partial

from areal_q.config import CalculatorTool
from areal_q.errors import ConfigError
from areal_q.messages import Ticket
from areal_q.tasks.datasets.countdown import evaluate
from rollout.engines.base import Completion
from rollout.environments.base import Environment, Response
from rollout.environments.engine_client import EngineClient


class Calculator(Environment):
    """Gives the model turns until it ends its answer, its token budget is spent, or it has made `max_calls`
    calls.

    With open "(", close ")" and after " ", the text `(12+34)` is followed by `46 `, whose loss mask is 0.
    """

    def __init__(self, client: EngineClient, cfg: CalculatorTool) -> None:
        """Raises ConfigError if `close` is not a single token."""
        self._client, self._tokenizer, self._cfg = client, client.tokenizer, cfg
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
            # Every earlier turn ended in a call, so that the number of turns is the number of calls.
            tool = {self._close} if response.turns < self._cfg.max_calls else set()
            stops = self._client.stop_ids | tool
            after = partial(self._after, response, stops)
            left = budget - response.drawn
            await self._client.generate_turn(ticket, index, response, stops, left, after)
        if not response.ended:
            response.finish_reason, response.ended = "length", True

    def _after(self, response: Response, stops: frozenset[int], done: Completion) -> None:
        called = int(done.response_ids[-1]) == self._close and self._close in stops
        if called and done.finish_reason != "timeout":
            response.add_given(self._result(response.ids), response.spans[-1])
        else:
            response.ended = True

    def _result(self, ids: Sequence[int]) -> list[int]:
        """Returns the tokens of the result of the last call in `ids`, or an empty list if it is not a valid
        call."""
        text = self._tokenizer.decode(ids).removesuffix(self._cfg.close)
        _, opened, expression = text.rpartition(self._cfg.open)
        found = evaluate(expression) if opened else None
        if found is None or found[0].denominator != 1:
            return []
        result = self._tokenizer.encode(f"{found[0]}{self._cfg.after}")
        return result if len(result) <= self._cfg.max_result_tokens else []
