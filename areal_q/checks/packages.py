"""Packages of extras that settings ask for, missed in the same words before anything is started and by the
process that needs them; and the environments of `areal-q setup`, which have those that are not here."""

import importlib.util
import sys

from areal_q.config import MegatronBackend, Run, SglangEngine, VllmEngine
from areal_q.config.run import EngineConfig
from areal_q.errors import ConfigError, installing
from areal_q.observability.trackers.registry import check_tracker_package
from areal_q.system.processes import READY, environment_at


def python_with(module: str, name: str) -> str:
    """Returns the Python of the environment `name` if that is whole and this one lacks the module; else this
    one."""
    there = environment_at(name)
    elsewhere = not importlib.util.find_spec(module) and (there / READY).exists()
    return str(there / "bin" / "python") if elsewhere else sys.executable


def worker_python(run: Run) -> str:
    """Returns the Python by which the run's workers are started here."""
    engine = run.rollout.engine
    if isinstance(engine, VllmEngine):
        return python_with("vllm", "vllm")
    if isinstance(engine, SglangEngine) and not engine.url:
        return python_with("sglang", "sglang")
    return sys.executable


def learner_python(run: Run) -> str:
    """Returns the Python by which the run's learner is started here."""
    megatron = isinstance(run.learner.backend, MegatronBackend)
    return python_with("megatron", "megatron") if megatron else sys.executable


def check_packages(run: Run, serves: bool) -> None:
    """Raises ConfigError, which names the extra, for the first package that a run started here lacks; `serves`
    is True if its workers have an endpoint."""
    if run.rollout.workers and worker_python(run) == sys.executable:
        check_engine_packages(run.rollout.engine)
        if serves:
            check_endpoint_packages()
    if isinstance(run.learner.backend, MegatronBackend) and learner_python(run) == sys.executable:
        check_megatron()
    for tracker in run.trackers:
        check_tracker_package(tracker)


def check_engine_packages(engine: EngineConfig) -> None:
    """A server of SGLang at a URL needs the client alone."""
    if isinstance(engine, VllmEngine):
        _needs("rollout.engine.type = 'vllm'", {"vllm": "vLLM"}, "areal-q setup vllm")
    elif isinstance(engine, SglangEngine):
        needed = {"aiohttp": "aiohttp"} | ({} if engine.url else {"sglang": "sglang"})
        how = installing("server") if engine.url else "areal-q setup sglang"
        _needs("rollout.engine.type = 'sglang'", needed, how)


def check_endpoint_packages() -> None:
    _needs("rollout.serve (--serve)", {"aiohttp": "aiohttp"}, installing("server"))


def check_megatron() -> None:
    _needs(
        "learner.backend.type = 'megatron'",
        {"megatron": "megatron-core"},
        "areal-q setup megatron",
    )


def _needs(who: str, packages: dict[str, str], how: str) -> None:
    """Raises ConfigError unless all modules are installed; `packages` gives their names for a message."""
    lacking = [name for module, name in packages.items() if not importlib.util.find_spec(module)]
    if lacking:
        raise ConfigError(f"{who} needs {' and '.join(lacking)}: {how}")
