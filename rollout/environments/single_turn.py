"""The environment in which the model answers the prompt in one turn."""

import asyncio
from dataclasses import dataclass

from areal_q.messages import Ticket
from rollout.engines.base import Completion
from rollout.environments.base import Environment, Response
from rollout.environments.engine_client import EngineClient


@dataclass(frozen=True)
class SingleTurn(Environment):
    """An Environment of one turn, which draws the whole group together."""

    client: EngineClient

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        if not any(response.ids for response in responses):
            await self.client.generate_group(ticket, responses)
            return
        async with asyncio.TaskGroup() as group:
            for index, response in enumerate(responses):
                if not response.ended:
                    group.create_task(self._rest(ticket, index, response))

    async def _rest(self, ticket: Ticket, index: int, response: Response) -> None:
        def end(completion: Completion) -> None:
            response.ended = True

        left = ticket.sampling.max_tokens - len(response.ids)
        if left < 1:
            response.finish_reason, response.ended = "length", True
            return
        await self.client.generate_turn(ticket, index, response, self.client.stop_ids, left, end)
