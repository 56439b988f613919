"""Chooses the environment of a run; the key is the type of `rollout.environment`'s settings."""

from collections.abc import Callable
from functools import partial
from typing import Any

from areal_q.config import CalculatorTool, External, Run
from areal_q.config import SingleTurn as SingleTurnConfig
from areal_q.tasks import unscored
from rollout.environments.base import Environment
from rollout.environments.calculator import Calculator
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes
from rollout.environments.single_turn import SingleTurn

ENVIRONMENTS: dict[type, Callable[[Run, EngineClient, Any], Environment]] = {
    SingleTurnConfig: lambda run, client, config: SingleTurn(client),
    CalculatorTool: lambda run, client, config: Calculator(client, config),
    External: lambda run, client, config: Episodes(
        client, config, run.learner.microbatch_tokens, partial(unscored, cfg=run.reward)
    ),
}


def build_environment(run: Run, client: EngineClient) -> Environment:
    """Builds the environment of training. Raises ConfigError for a tool that the tokenizer cannot spell."""
    config = run.rollout.environment
    return ENVIRONMENTS[type(config)](run, client, config)


def build_evaluation_environment(run: Run, client: EngineClient) -> Environment:
    """Builds the environment of held-out problems: that of training, except that the worker itself answers in
    one turn where training is left to outside agents."""
    outside = isinstance(run.rollout.environment, External)
    return SingleTurn(client) if outside else build_environment(run, client)
