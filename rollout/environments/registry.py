"""Chooses the environment of a run by the type of its settings, `rollout.environment`."""

from collections.abc import Callable
from typing import Any

from areal_q.config import CalculatorTool, External, PythonEnvironment, Run, VerifiersEnvironment
from areal_q.config import SingleTurn as SingleTurnConfig
from rollout.environments.base import Environment
from rollout.environments.calculator import Calculator
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes
from rollout.environments.own_environment import OwnTurns
from rollout.environments.played_episodes import PlayedEpisodes
from rollout.environments.single_turn import SingleTurn

ENVIRONMENTS: dict[type, Callable[[Run, EngineClient, Any], Environment]] = {
    SingleTurnConfig: lambda run, client, config: SingleTurn(client),
    CalculatorTool: lambda run, client, config: Calculator(client, config),
    External: Episodes,
    VerifiersEnvironment: PlayedEpisodes,
    PythonEnvironment: OwnTurns,
}


def build_environment(run: Run, client: EngineClient) -> Environment:
    """Returns the environment of training and evaluation. Raises ConfigError for a tool whose end marker is not
    one token."""
    config = run.rollout.environment
    return ENVIRONMENTS[type(config)](run, client, config)
