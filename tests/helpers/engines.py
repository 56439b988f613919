"""Engines that have weights, and what they are asked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
from helpers.commands import stretched
from helpers.policies import initial_model
from msgspec.structs import asdict
from numpy.typing import ArrayLike

from areal_q.config import Run, Sampling, ScriptedEngine, TorchEngine
from areal_q.config.run import EngineConfig
from areal_q.messages import Ticket
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightSource
from learner.publishing.version_builder import VersionBuilder
from rollout.build import EndpointAddress, serve
from rollout.engines import build_engine
from rollout.engines.base import Completion, Engine, Request
from rollout.engines.scripted import Answer, ScriptedStepper, reverse
from rollout.environments.base import Environment, Response


async def responses(environment: Environment, ticket: Ticket) -> list[Response]:
    """Returns the responses to a ticket, which the environment has completed."""
    found = [Response() for _ in range(ticket.group_size)]
    await environment(ticket, found)
    return found


def ask(
    prompt: ArrayLike,
    samples: int = 1,
    seed: int = 0,
    stop_ids: Iterable[int] = (),
    **sampling: Any,
) -> Request:
    return Request(
        prompt_ids=np.array(prompt, np.int32),
        num_samples=samples,
        sampling=Sampling(**sampling),
        seed=seed,
        stop_ids=frozenset(stop_ids),
    )


def ask_for(ticket: Ticket, *stop_ids: int) -> Request:
    sampling = asdict(ticket.sampling)
    return ask(ticket.prompt_ids.numpy(), ticket.group_size, ticket.seed, stop_ids, **sampling)


@asynccontextmanager
async def serving(engine: Engine, weights: WeightVersion) -> AsyncIterator[Any]:
    """Starts the engine with these weights, and closes it."""
    try:
        await engine.start()
        await engine.load_weights(weights)
        yield engine
    finally:
        await engine.close()


def initial_version(run: Run, version: int = 0) -> WeightVersion:
    return VersionBuilder(run).build(initial_model(run), version)


def generate(
    weights: WeightVersion,
    *requests: Request,
    config: EngineConfig = TorchEngine(slots=64),  # noqa: B008
) -> list[list[Completion]]:
    """The responses of a new engine to all requests at once."""

    async def main() -> list[list[Completion]]:
        async with serving(build_engine(config), weights) as engine:
            return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(main())


@contextmanager
def worker_beside(redis_url: str, run: str) -> Iterator[None]:
    """A worker in a thread of this process, for as long as the block takes."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(
        serve(redis_url, run, "w", WeightSource(), lambda _: None, EndpointAddress(), 0.0)
    )

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    assert task.cancelled(), task.exception()


class HeldStepper(ScriptedStepper):
    """A scripted engine whose step ends when the test lets it. It lets go of the interpreter meanwhile, as that
    of a large model does, which takes seconds."""

    def __init__(self, answer: Answer = reverse) -> None:
        super().__init__(ScriptedEngine(), answer, certainty=lambda version: 1.0, vocab_size=64)
        self.begun = threading.Semaphore(0)
        """Has a permit for each step that has begun"""
        self.may_end = threading.Semaphore(0)
        """Takes a permit for each step that ends"""
        self.at_once: list[int] = []
        """The number of responses that each step drew a token of"""

    def step(self) -> int:
        self.begun.release()
        assert self.may_end.acquire(timeout=stretched(60)), "the test did not let the step end"
        self.at_once.append(drawn := super().step())
        return drawn

    def let_go(self) -> None:
        """Lets this step end, and all that follow."""
        self.may_end.release(1_000_000)

    async def in_step(self) -> None:
        """Waits until the next step has begun."""
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0.001)
