"""Engines behind one Protocol, chosen by the type of the engine's settings."""

from collections.abc import Callable
from typing import Any

from areal_q.checks.machine import check_device
from areal_q.config.run import EngineConfig, TorchEngine
from rollout.engines import reference
from rollout.engines.base import Capabilities, Engine


def _torch(config: Any) -> Engine:
    from rollout.engines.reference.torch_engine import torch_engine

    return torch_engine(config)


def _hf(config: Any) -> Engine:
    from rollout.engines.group_caches import hf_engine

    return hf_engine(config)


def _scripted(config: Any) -> Engine:
    from rollout.engines.scripted import scripted_engine

    return scripted_engine(config)


def _vllm(config: Any) -> Engine:
    from rollout.engines.vllm_backend.vllm_engine import vllm_engine

    return vllm_engine(config)


def _sglang(config: Any) -> Engine:
    from rollout.engines.sglang_backend.sglang_engine import sglang_engine

    return sglang_engine(config)


ENGINES: dict[str, Callable[[Any], Engine]] = {
    "torch": _torch,
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _sglang,
    "scripted": _scripted,
}


def build_engine(config: EngineConfig) -> Engine:
    """Returns the engine for `config`, which needs no running event loop to be built. Await `engine.start()`
    before the first request. Raises ConfigError if the engine cannot run here."""
    return ENGINES[type(config).__struct_config__.tag](config)  # type: ignore[index]


def capabilities_of(config: EngineConfig) -> Capabilities:
    """Returns what the engine for `config` can do, without torch if it is the reference engine on a CPU. Raises
    as `build_engine` does."""
    if type(config) is TorchEngine:
        check_device("rollout.engine.device", config.device)
        return reference.CAPABILITIES
    return build_engine(config).capabilities
