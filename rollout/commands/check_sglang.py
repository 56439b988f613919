"""Queries a running SGLang server for `areal-q check`, without changing anything in it."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_q.checks.machine import CheckResult
from areal_q.config import ModelConfig, PretrainedModel, SglangEngine
from areal_q.errors import ConfigError, EngineDied
from areal_q.models import load_config
from areal_q.system.credentials import secret, shown
from areal_q.system.local_requests import LOOPBACK
from rollout.engines.sglang_backend import server_checks
from rollout.engines.sglang_backend.http_client import SglangClient
from rollout.engines.sglang_backend.sglang_engine import handover_directory

ASK_S = 5.0
"""Seconds to wait for each answer"""
UPDATE = "/update_weights_from_disk"


async def server_of(model: ModelConfig, config: SglangEngine) -> list[CheckResult]:
    """Finds out whether an SGLang server answers at `config.url`, with which model and settings, and whether it
    can load the run's weights. Raises CheckpointError if the run's own model cannot be read."""
    assert config.url is not None
    ours = "qwen3_moe" if not isinstance(model, PretrainedModel) and model.experts else "qwen3"
    if isinstance(model, PretrainedModel):
        ours = load_config(model.path).family
    name = "sglang server"
    try:
        client = SglangClient(config.url, secret("SGLANG_KEY_FILE"), ASK_S)
    except ConfigError as error:
        return [CheckResult(name, "error", str(error), "a file with the server's key in it")]
    try:
        return [finding async for finding in _asked(client, ours, config)]
    except ConfigError as error:
        return [
            CheckResult(name, "error", str(error), "SGLANG_KEY_FILE: a file with the server's key")
        ]
    except (EngineDied, ValueError) as error:
        says = f"rollout.engine.url: {shown(config.url)}: {error}"
        return [CheckResult(name, "error", says, "start it, or name another rollout.engine.url")]
    finally:
        await client.close()


async def _asked(
    client: SglangClient, ours: str, config: SglangEngine
) -> AsyncIterator[CheckResult]:
    info = await client.get("/server_info")
    if not isinstance(info, dict) or "version" not in info:
        raise EngineDied("what answers there is no SGLang")
    yield CheckResult("sglang server", "ok", f"{shown(client.url)} is SGLang {info['version']}")
    yield _model(await client.get("/model_info"), ours)
    try:
        server_checks.check_settings(info, config)
        yield CheckResult("its settings", "ok", "seeds, order of steps and log-probs as configured")
    except ConfigError as error:
        yield CheckResult(
            "its settings", "error", str(error), "start it anew, or change the setting"
        )
    yield await _weights(client, config)


def _model(told: dict[str, Any], ours: str) -> CheckResult:
    family = told.get("model_type")
    says = f"{told.get('model_path')}, a {family}, weights {told.get('weight_version')}"
    if family == ours:
        return CheckResult("its model", "ok", says)
    return CheckResult(
        "its model", "error", f"{says}; the run's is a {ours}", "serve the run's model"
    )


async def _weights(client: SglangClient, config: SglangEngine) -> CheckResult:
    """Checks that the server has a route to load weights by, and that the directory in which versions are
    handed over can be written here and is one that the server sees."""
    name, place = "its weights", handover_directory(config)
    try:
        paths = (await client.get("/openapi.json"))["paths"]
    except (EngineDied, KeyError, TypeError):
        paths = None  # a server can be configured not to list its routes
    if paths is not None and UPDATE not in paths:
        return CheckResult(
            name, "error", f"{shown(client.url)} has no {UPDATE}", "SGLang 0.5.23 or newer"
        )
    if not os.access(place, os.W_OK):
        fix = "another rollout.engine.directory"
        return CheckResult(name, "error", f"versions cannot be written to {place}", fix)
    if config.directory is None and urlsplit(client.url).hostname not in LOOPBACK:
        says = f"versions are handed over in {place}, which a server elsewhere does not see"
        fix = "rollout.engine.directory: one that both see under the same name"
        return CheckResult(name, "warning", says, fix)
    if paths is None:
        return CheckResult(
            name, "note", f"whether there is {UPDATE} is not told", "the first version"
        )
    return CheckResult(name, "ok", f"can be loaded from {Path(place)}")
