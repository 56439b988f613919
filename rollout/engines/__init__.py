"""Engines behind one Protocol, chosen by the type of the engine's settings."""

from pkgutil import resolve_name

from areal_q.checks.machine import check_device
from areal_q.config.run import EngineConfig, TorchEngine
from rollout.engines import reference
from rollout.engines.base import Capabilities, Engine

ENGINES = {
    "torch": "rollout.engines.reference.torch_engine:torch_engine",
    "hf": "rollout.engines.group_caches:hf_engine",
    "vllm": "rollout.engines.vllm_backend.vllm_engine:vllm_engine",
    "sglang": "rollout.engines.sglang_backend.sglang_engine:sglang_engine",
    "scripted": "rollout.engines.scripted:scripted_engine",
}
"""The function that builds an engine from its settings, by their tag; its module is imported when it is asked
for, as most need torch or more."""


def build_engine(config: EngineConfig) -> Engine:
    """Returns the engine for `config`, which needs no running event loop to be built. Await `engine.start()`
    before the first request. Raises ConfigError if the engine cannot run here."""
    return resolve_name(ENGINES[str(type(config).__struct_config__.tag)])(config)


def capabilities_of(config: EngineConfig) -> Capabilities:
    """Returns what the engine for `config` can do, without torch if it is the reference engine on a CPU. Raises
    as `build_engine` does."""
    if type(config) is TorchEngine:
        check_device("rollout.engine.device", config.device)
        return reference.CAPABILITIES
    return build_engine(config).capabilities
