"""What vLLM is asked to compute with on a CPU, and what is refused, as far as it shows without vLLM."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from helpers.engines import initial_version
from helpers.fixture_types import MakeRun

from areal_q.config import RolloutConfig, VllmEngine, load
from areal_q.errors import ConfigError, EngineDied
from areal_q.models import DecoderConfig
from areal_q.quant import FORMATS
from rollout.build import EndpointAddress, build_parts
from rollout.commands.check import engine_of, model_of, vllm_on_cpu
from rollout.engines.process.checkpoint_backend import UNQUANTIZED, check_quantized
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.engines.vllm_backend import cpu_kernels, vllm_engine
from rollout.engines.vllm_backend.cache_size import cache_for
from rollout.engines.vllm_backend.vllm_engine import VllmBackend

QWEN = DecoderConfig(
    family="qwen2",
    vocab_size=151936,
    width=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    mlp=4864,
    max_positions=32768,
)
"""The shape of Qwen2.5-0.5B"""
MIB = 1 << 20
ONE_HEAD = ("model.heads=1", "model.kv_heads=1")
"""Of 32 numbers, as vLLM's attention takes them"""


@pytest.mark.parametrize("amx", [True, False])
def test_dtypes_do_not_depend_on_the_processor(monkeypatch, amx):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    found = {format: cpu_kernels.dtype_for(format) for format, _ in cpu_kernels.KERNELS}
    assert found == {
        "bf16": "float32",
        "int8": "float32",
        "int4": "bfloat16",
        "fp8-channel": "float32",
    }
    assert cpu_kernels.has_amx() == amx


def test_every_kernel_says_its_tolerance_and_why():
    assert set(FORMATS) >= cpu_kernels.FORMATS
    for kernel in cpu_kernels.KERNELS.values():
        assert 0 < kernel.tolerance_nats < 2 and kernel.product and kernel.why
    with pytest.raises(ConfigError, match="int4' in bfloat16"):
        cpu_kernels.kernel_for("int4", "float32")


def test_int4_in_float32_is_refused_with_the_settings():
    asked = ["rollout.engine.type=vllm", "rollout.engine.dtype=float32"]
    with pytest.raises(ConfigError, match=r"rollout\.engine\.dtype = 'float32' with .*int4"):
        load(None, [*asked, "rollout.format=int4"])
    load(None, [*asked, "rollout.format=int8"])


@pytest.mark.parametrize("amx", [True, False])
def test_check_names_kernel_dtype_and_tolerance(monkeypatch, amx):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = load(None, ["rollout.engine.type=vllm", "rollout.format=int8"])
    (found,) = vllm_on_cpu(run.rollout)
    assert found.level == "ok"
    assert "int8 in float32 by oneDNN INT8" in found.says and "0.3 nats" in found.says
    assert ("has AMX" if amx else "has no AMX") in found.says
    assert list(vllm_on_cpu(RolloutConfig())) == []


@pytest.mark.parametrize(
    ("settings", "dtype", "size", "positions"),
    [
        ({}, "float32", 771 * MIB, 32768),
        ({}, "bfloat16", 771 * MIB // 2, 32768),
        ({"kv_cache": "fp8"}, "float32", 256 * MIB, 32768),
        ({"max_positions": 2048}, "float32", 256 * MIB, 2048),
        ({"kv_cache_bytes": 256 * MIB}, "float32", 256 * MIB, 10752),
        ({"kv_cache_bytes": 256 * MIB, "max_positions": 10752}, "float32", 256 * MIB, 10752),
        ({"max_positions": 131072}, "float32", 3075 * MIB, 131072),
    ],
)
def test_a_cache_holds_a_sequence_of_all_positions(settings, dtype, size, positions):
    assert cache_for(VllmEngine(**settings), QWEN, dtype) == (size, positions)


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_bytes": 256 * MIB, "max_positions": 10753}, {"kv_cache_bytes": MIB}],
)
def test_a_cache_too_small_is_refused_with_our_settings(settings):
    with pytest.raises(ConfigError, match=r"kv_cache_bytes = \d+ holds .*max_positions.* take \d+"):
        cache_for(VllmEngine(**settings), QWEN, "float32")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories from which vLLM was started, each without success."""
    seen: list[str] = []

    def start(path: str, settings: dict[str, Any]) -> None:
        seen.append(path)
        raise ValueError("1 validation error\n  max_model_len: Value error, too long")

    monkeypatch.setattr(vllm_engine, "_start_vllm", start)
    return seen


@pytest.mark.parametrize("format", ["int8-weight", "fp8-weight", "fp8", "nvfp4", "nf4"])
def test_formats_without_a_product_are_refused_by_name(monkeypatch, format):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    engine = VllmEngine()
    problem = VllmBackend(engine).capabilities.lacks(RolloutConfig(format=format, engine=engine))
    assert problem is not None and f"rollout.format: {format} is not among bf16" in problem


@pytest.mark.parametrize("format", ["int8", "int4", "fp8-channel"])
def test_quantized_experts_are_refused_by_name(
    monkeypatch, make_run: MakeRun, every_engine_installed: None, format: str
):
    """In all processes alike: vLLM has them for processors with AMX alone."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(cpu_kernels, "FORMATS", frozenset(FORMATS))
    asked = ["rollout.engine.type=vllm", "model.experts=4"]
    words = f"of a mixture of experts {format} is not among bf16"
    run = make_run(*asked, f"rollout.format={format}")
    (found,) = engine_of(run)
    assert found.level == "error" and words in found.says
    with pytest.raises(ConfigError, match=words):
        build_parts(run, "r", EndpointAddress())
    assert [one.level for one in engine_of(make_run(*asked, "rollout.format=bf16"))] == ["ok"] * 2


def test_gates_of_experts_alone_may_stay_unquantized():
    gates = {
        f"model.layers.0.mlp.{name}": UNQUANTIZED[0] for name in ("gate", "shared_expert_gate")
    }
    expert = "model.layers.0.mlp.shared_expert.down_proj"
    check_quantized("vLLM", gates | {expert: "CompressedTensorsLinearMethod"}, "int8")
    with pytest.raises(EngineDied, match=expert):
        check_quantized("vLLM", gates | {expert: UNQUANTIZED[0]}, "int8")


async def test_widths_that_vllm_cannot_hold_start_nothing(make_run: MakeRun, starts: list[str]):
    engine = StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match=r"rollout\.format = 'int4': vLLM takes int4 only where"):
        await engine.load_weights(initial_version(make_run("rollout.format=int4")))
    assert (starts, engine.deaths) == ([], 0)
    await engine.close()


async def test_heads_that_vllm_does_not_compute_are_named(
    monkeypatch: pytest.MonkeyPatch,
    make_run: MakeRun,
    starts: list[str],
    every_engine_installed: None,
):
    """By `areal-q check`, too, in the same words. Its core died of them, three times."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    narrow = make_run("rollout.engine.type=vllm", "rollout.format=bf16")
    (found,) = model_of(narrow)
    assert found.level == "error" and "no heads of 8: 32, 64" in found.says
    model_of_width_32 = model_of(make_run("rollout.engine.type=vllm", *ONE_HEAD))
    assert all(one.level != "error" for one in model_of_width_32)
    engine = StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match="no heads of 8: 32, 64"):
        await engine.load_weights(initial_version(narrow))
    assert (starts, engine.deaths) == ([], 0)
    await engine.close()


async def test_a_value_that_vllm_refuses_is_tried_once(make_run: MakeRun, starts: list[str]):
    engine = StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match="or the model: 1 validation error max_model_len: Value"):
        await engine.load_weights(initial_version(make_run("rollout.format=int8", *ONE_HEAD)))
    assert (len(starts), engine.deaths) == (1, 0)
    await engine.close()


async def test_vllm_is_freed_while_its_modules_are_there(monkeypatch: pytest.MonkeyPatch):
    """Freed at the interpreter's end, its __del__ wrote a TypeError into the worker's log."""

    class Cyclic:
        def __init__(self) -> None:
            self.output_handler = self

        def shutdown(self, timeout: float) -> None: ...

    backend = VllmBackend(VllmEngine())
    monkeypatch.setattr(backend, "_llm", Cyclic())
    left = weakref.ref(backend._llm)
    gc.disable()
    try:
        await backend.close()
        assert left() is None
    finally:
        gc.enable()


CORE = """
import logging, sys
logging.basicConfig(format="(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] %(message)s")
try:
    raise {error}
except Exception:
    logging.exception("EngineCore failed to start.")
try:
    raise Exception("WorkerProc initialization failed due to an exception in a background process.")
except Exception:
    logging.exception("EngineCore failed to start.")
"""
"""A process that says what vLLM's core does when it fails"""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capfd) -> Callable[[str], list[str]]:
    """Makes each start of vLLM fail since a process of it raises `error`; returns the list of starts."""

    def make(error: str) -> list[str]:
        seen: list[str] = []

        def start(path: str, settings: dict[str, Any]) -> None:
            seen.append(path)
            subprocess.run([sys.executable, "-c", CORE.format(error=error)], check=True)
            raise RuntimeError("Engine core initialization failed. See root cause above.")

        monkeypatch.setattr(vllm_engine, "_start_vllm", start)
        return seen

    return make


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("ValueError('cache too small for max_model_len')", "ValueError: cache too small for "),
        ("KeyError('layers.0.weight')", "KeyError: 'layers.0.weight'$"),
    ],
)
async def test_a_cause_in_vllms_process_is_told_and_met_once(
    make_run: MakeRun, failing: Callable[[str], list[str]], error: str, told: str
):
    starts, engine = failing(error), StreamingEngine(VllmBackend(VllmEngine()))
    with pytest.raises(ConfigError, match=f"^vLLM refuses the settings or the model: {told}"):
        await engine.load_weights(initial_version(make_run("rollout.format=int8", *ONE_HEAD)))
    assert (len(starts), engine.deaths) == (1, 0)
    await engine.close()


async def test_a_lack_of_memory_is_told_and_tried_again(
    make_run: MakeRun, failing: Callable[[str], list[str]]
):
    starts = failing("RuntimeError('out of memory')")
    engine = StreamingEngine(VllmBackend(VllmEngine(restarts=1)))
    with pytest.raises(EngineDied, match=r"^vLLM did not start: RuntimeError: out of memory$"):
        await engine.load_weights(initial_version(make_run("rollout.format=int8", *ONE_HEAD)))
    assert (len(starts), engine.deaths) == (2, 2)
    await engine.close()


async def test_what_no_process_says_is_as_vllm_says_it(
    make_run: MakeRun, failing: Callable[[str], list[str]]
):
    failing("SystemExit(0)")
    engine = StreamingEngine(VllmBackend(VllmEngine(restarts=0)))
    with pytest.raises(EngineDied, match=r"^vLLM did not start: Engine core initialization failed"):
        await engine.load_weights(initial_version(make_run("rollout.format=int8", *ONE_HEAD)))
    await engine.close()
