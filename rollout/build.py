"""Sets up a worker from what the learner left in Redis."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from areal_q.config import CalculatorTool, EnvironmentConfig, External, Run, ScriptedEngine, parse
from areal_q.errors import ConfigError
from areal_q.tasks import build_reward, build_tokenizer
from buffer.redis_buffer import WorkerBuffer
from rollout.endpoint import Endpoint
from rollout.engines import build_engine
from rollout.environments import Calculator, Environment, Player, SingleTurn
from rollout.episodes import Episodes
from rollout.receiver import Receiver
from rollout.source import Source
from rollout.worker import Room, Worker

logger = logging.getLogger(__name__)


async def serve(
    redis_url: str,
    run_name: str,
    name: str,
    source: Source,
    observe: Callable[[dict[str, Any]], None],
    address: str = "",
    token_file: str | None = None,
) -> None:
    """Joins run `run_name` and works until cancelled; `observe` is told every heartbeat. At `address`, if
    there is one, the OpenAI-compatible endpoint is served."""
    endpoint: Endpoint | None = None
    buffer = WorkerBuffer(redis_url, run_name, name)
    receiver: Receiver | None = None
    try:
        config_toml, endpoints = await buffer.run_info()
        run = parse(config_toml, f"run {run_name}")
        buffer.claim_timeout_s = run.buffer.claim_timeout_s
        buffer.max_deliveries = run.buffer.max_deliveries
        torch.set_num_threads(run.rollout.threads)
        tokenizer = build_tokenizer(run)
        receiver = Receiver(
            *source.endpoints(endpoints),
            run=run_name,
            config=run.broadcast,
            keys=source.load_keys(run.broadcast.keys),
        )
        engine = build_engine(run.rollout.engine)
        if problem := engine.capabilities.lacks(run.rollout, run.learner.routing_replay):
            raise ConfigError(f"engine {engine.name}: {problem}")
        player = Player(engine, tokenizer, run.rollout.request_timeout_s)
        environment = build_environment(run.rollout.environment, player)
        external = isinstance(environment, Episodes)
        if external and not address:
            raise ConfigError(
                "rollout.environment.type = 'external' needs rollout.serve, or --serve [HOST:]PORT"
            )
        if address:
            endpoint = Endpoint(
                engine=engine,
                tokenizer=tokenizer,
                model=run_name,
                episodes=environment if isinstance(environment, Episodes) else None,
                sampling=run.rollout.sampling,
                address=address,
                token_file=token_file,
            )
        worker = Worker(
            name=name,
            engine=engine,
            buffer=buffer,
            receiver=receiver,
            tokenizer=tokenizer,
            reward=build_reward(run),
            weight_format=run.rollout.format,
            room=room(run),
            max_lag=run.learner.max_lag,
            observe=observe,
            source=source,
            environment=environment,
            evaluation=SingleTurn(player) if external else environment,
            routes=run.learner.routing_replay,
        )
        if endpoint:
            await endpoint.start()
        await worker.run()
    finally:
        if endpoint:
            await endpoint.close()
        if receiver:
            receiver.close()
        await buffer.close()


def build_environment(config: EnvironmentConfig, player: Player) -> Environment:
    """Raises ConfigError for a tool that the tokenizer cannot spell."""
    match config:
        case CalculatorTool():
            return Calculator(player, config)
        case External():
            return Episodes(player, config)
        case _:
            return SingleTurn(player)


def room(run: Run) -> Room:
    """What fills the engine, and a quarter in reserve; two groups at least."""
    engine, size = run.rollout.engine, run.learner.group_size
    slots = 256 if isinstance(engine, ScriptedEngine) else engine.slots
    return Room(max(2 * size, slots * 5 // 4), slots, size)
