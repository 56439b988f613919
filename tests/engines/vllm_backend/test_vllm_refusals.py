"""What vLLM would refuse at every start is refused at the first one, in one line. vLLM itself is not needed."""

from typing import Any

import pytest
from helpers.engines import initial_version
from helpers.fixture_types import MakeRun

from areal_q.config import VllmEngine
from areal_q.errors import ConfigError
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.engines.vllm_backend import vllm_engine
from rollout.engines.vllm_backend.vllm_engine import VllmBackend


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories from which vLLM was started, each without success."""
    seen: list[str] = []

    def start(path: str, settings: dict[str, Any]) -> None:
        seen.append(path)
        raise ValueError("1 validation error\n  max_model_len: Value error, too long")

    monkeypatch.setattr(vllm_engine, "_start_vllm", start)
    return seen


async def test_widths_that_vllm_cannot_hold_start_nothing(make_run: MakeRun, starts: list[str]):
    engine = StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match=r"rollout\.format = 'int4': vLLM takes int4 only where"):
        await engine.load_weights(initial_version(make_run("rollout.format=int4")))
    assert (starts, engine.deaths) == ([], 0)
    await engine.close()


async def test_a_value_that_vllm_refuses_is_tried_once(make_run: MakeRun, starts: list[str]):
    engine = StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match="or the model: 1 validation error max_model_len: Value"):
        await engine.load_weights(initial_version(make_run("rollout.format=int8")))
    assert (len(starts), engine.deaths) == (1, 0)
    await engine.close()
