"""The requests that environments send to an engine: one turn of a whole group, or of one response."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from areal_q.messages import Ticket
from areal_q.tasks import Tokenizer
from rollout.engines.base import Completion, Engine, Request, TokenCallback
from rollout.environments.base import Response


@dataclass(frozen=True)
class EngineClient:
    """Sends an environment's requests to the engine and adds the tokens to the responses."""

    engine: Engine
    tokenizer: Tokenizer
    timeout_s: float = 0.0
    """Seconds after which a response is cut off, from its first token on; 0 means no limit."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids of all tokens that end a turn."""
        return frozenset(self.tokenizer.stops)

    async def generate_group(self, ticket: Ticket, responses: list[Response]) -> None:
        """Draws one turn of all responses, which must be empty; the prompt is computed only once."""

        def take(index: int, completion: Completion) -> None:
            responses[index].add_drawn(completion)
            responses[index].ended = completion.finish_reason is not None

        await self.engine.generate(
            Request(
                prompt_ids=ticket.prompt_ids.numpy(),
                num_samples=ticket.group_size,
                sampling=ticket.sampling,
                seed=ticket.seed,
                stop_ids=self.stop_ids,
                decode=self.tokenizer.decode,
                timeout_s=self.timeout_s,
                masked=ticket.masked,
            ),
            on_response=take,
        )

    async def generate_turn(
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
        """Draws one more turn of `response`, or the rest of one that was cut off, and adds it.

        Each turn draws from its own stream of random numbers. `then` is called as soon as the turn has ended,
        before the task can be cancelled. `stop` adds stop strings to those of the ticket.
        """
        sampling = ticket.sampling

        def take(_: int, completion: Completion) -> None:
            response.add_drawn(completion)
            if completion.finish_reason is not None:
                then(completion)

        (completion,) = await self.engine.generate(
            Request(
                prompt_ids=np.array(response.context(ticket), np.int32),
                num_samples=1,
                sampling=replace(sampling, max_tokens=max_tokens, stop=(*sampling.stop, *stop)),
                seed=ticket.seed + index + (response.turns << 32),
                stop_ids=stop_ids,
                decode=self.tokenizer.decode,
                drawn=response.pending,
                timeout_s=self.timeout_s,
                masked=ticket.masked,
            ),
            on_token,
            take,
        )
        return completion
