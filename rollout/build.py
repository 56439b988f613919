"""Sets up a worker from the run's settings, which the learner stored in Redis."""

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import torch

from areal_q.checks.automatic import has_experts
from areal_q.checks.hub import fetched
from areal_q.config import Run, parse
from areal_q.config.tasks import chat_of
from areal_q.errors import (
    BufferUnavailable,
    ConfigError,
    RecordError,
    RunChanged,
    RunFinished,
    UserError,
)
from areal_q.tasks import Tokenizer, build_tokenizer
from buffer.redis_store import WorkerBuffer
from buffer.weight_sync import WeightSource, WeightSubscriber
from rollout.engines import build_engine
from rollout.engines.base import Engine
from rollout.environments.base import Environment
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes
from rollout.environments.registry import build_environment
from rollout.openai_server.app import Endpoint
from rollout.worker import Worker, first_error

logger = logging.getLogger(__name__)


class EndpointAddress(NamedTuple):
    """Address of the OpenAI-compatible endpoint, for example EndpointAddress("0.0.0.0:8000",
    "/run/secrets/token")."""

    at: str = ""
    """Host and port as [HOST:]PORT; "" means that there is no endpoint."""
    token_file: str | None = None


class WorkerParts(NamedTuple):
    """The components of a worker that follow from the settings alone."""

    engine: Engine
    tokenizer: Tokenizer
    environment: Environment
    endpoint: Endpoint | None


def build_parts(run: Run, run_name: str, address: EndpointAddress) -> WorkerParts:
    """Returns the components and starts none of them. Raises ConfigError, which names the setting, for what
    cannot be done on this machine."""
    local = fetched(run)
    tokenizer = build_tokenizer(local.model, run.task)
    engine = build_engine(run.rollout.engine)
    replays, experts = run.learner.routing_replay, has_experts(local)
    if problem := engine.capabilities.lacks(run.rollout, replays, experts):
        raise ConfigError(f"engine {engine.name}: {problem}")
    client = EngineClient(engine, tokenizer, run.rollout.request_timeout_s)
    environment = build_environment(run, client)
    endpoint = build_endpoint(run, run_name, client, environment, address)
    if environment.at_endpoint and not endpoint:
        raise ConfigError(
            "rollout.environment.type = 'external' needs rollout.serve, or --serve [HOST:]PORT"
        )
    return WorkerParts(engine, tokenizer, environment, endpoint)


def build_endpoint(
    run: Run, name: str, client: EngineClient, environment: Environment, address: EndpointAddress
) -> Endpoint | None:
    """Returns an endpoint, not started yet, whose model is called `name`; None without an address, unless the
    environment itself plays there. Raises ConfigError for an address that cannot be used."""
    at = address.at or ("0" if environment.plays_itself else "")
    if not at:
        return None
    return Endpoint(
        engine=client.engine,
        tokenizer=client.tokenizer,
        model=name,
        episodes=environment if isinstance(environment, Episodes) else None,
        sampling=run.rollout.sampling,
        address=at,
        token_file=address.token_file,
        reply_format=chat.reply_format if (chat := chat_of(run.task)) else "auto",
    )


async def serve(
    redis_url: str,
    run_name: str,
    name: str,
    source: WeightSource,
    observe: Callable[[dict[str, Any]], None],
    address: EndpointAddress,
    finished_wait_s: float,
) -> None:
    """Joins run `run_name` and works until the run is finished, or until cancelled. `observe` is called with
    the status of every heartbeat. If the run is finished already, a learner has `finished_wait_s` seconds to
    resume it. Raises BufferUnavailable if Redis does not answer for a minute, RecordError if no ticket becomes
    a group any more, and UserError for what the engine, the reward or the environment refuses.

    If another run takes that name, or the run is resumed with other settings, the worker sets itself up anew
    from what the learner has stored. It does not exit, since not every worker has a service manager that would
    start it again.
    """
    finished, gone = False, None
    task = asyncio.current_task()
    assert task is not None
    while not finished:
        try:
            # In a task of its own: before Python 3.13 a TaskGroup that ends with an error forgets a
            # cancellation, and its task counts one more, whether one came or not.
            work = _serve(redis_url, run_name, name, source, observe, address, finished_wait_s)
            await asyncio.create_task(work)
        except* RunChanged as changed:
            logger.warning("%s; setting up anew", changed.exceptions[0])
        except* RunFinished as ended:
            logger.info("%s: this worker ends", ended.exceptions[0])
            finished = True
        except* (BufferUnavailable, RecordError, UserError) as errors:
            finished, gone = True, first_error(errors)
        if not finished and task.cancelling():
            raise asyncio.CancelledError
    if gone is not None:
        raise gone


async def _serve(
    redis_url: str,
    run_name: str,
    name: str,
    source: WeightSource,
    observe: Callable[[dict[str, Any]], None],
    address: EndpointAddress,
    finished_wait_s: float,
) -> None:
    async with AsyncExitStack() as stack:
        buffer = WorkerBuffer(redis_url, run_name, name)
        stack.push_async_callback(buffer.close)
        info = await buffer.run.unfinished(finished_wait_s)
        buffer.run.join(info)
        run = parse(info.config, f"run {run_name}")
        buffer.claim_timeout_s = run.buffer.claim_timeout_s
        buffer.max_deliveries = run.buffer.max_deliveries
        torch.set_num_threads(run.rollout.threads)
        parts = build_parts(run, run_name, address)
        subscriber = WeightSubscriber(
            *source.endpoints(info.endpoints),
            run=run_name,
            run_id=info.run_id,
            config=run.broadcast,
            keys=source.load_keys(run.broadcast.keys),
        )
        stack.callback(subscriber.close)
        if parts.endpoint:
            stack.push_async_callback(parts.endpoint.close)
        worker = Worker(
            name=name, engine=parts.engine, buffer=buffer, subscriber=subscriber, tokenizer=parts.tokenizer,
            environment=parts.environment, run=run, run_id=info.run_id, observe=observe, source=source,
        )  # fmt: skip
        gc.collect()
        gc.freeze()  # A collection that looks through all of this held the loop for 120 ms.
        stack.callback(gc.unfreeze)  # An endpoint is a part of circles, and holds its engine.
        await worker.run(parts.endpoint.start if parts.endpoint else None)
