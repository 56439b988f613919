"""vLLM as the engine, for real, on a CPU: exact log-probs, updates in flight, and every trap known of it.

Needs vLLM, so it runs in an environment of its own: `make test-vllm`.
"""

import asyncio
import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import is_alive
from helpers.engines import serving
from helpers.paths import ROOT
from helpers.served_model import (
    CONFIG,
    HANG_S,
    PROMPT,
    ask,
    gap,
    one_alive,
    packed,
    published,
    swapped_after,
)
from msgspec.structs import replace
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_q.cli.quantize import quantize
from areal_q.config import VllmEngine
from areal_q.errors import ConfigError, EngineDied, RecordError
from areal_q.models import Decoder, init_weights, save_decoder
from areal_q.quant import dequantize_state, quantize_state
from areal_q.weights.version import pack_version
from rollout.engines.process.checkpoint_backend import check_quantized
from rollout.engines.process.own_directory import SEGMENTS, SHARED_MEMORY
from rollout.engines.vllm_backend import cpu_kernels
from rollout.engines.vllm_backend.cache_size import Cache
from rollout.engines.vllm_backend.vllm_engine import VllmBackend, vllm_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(HANG_S),
    pytest.mark.filterwarnings("ignore"),  # of vLLM's and its dependencies' own
]
pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")


@pytest.fixture(scope="module")
def live(runner):
    with one_alive(runner, lambda **more: vllm_engine(VllmEngine(slots=64, **more))) as live:
        yield live


TOLERANCE = {
    format: cpu_kernels.kernel_for(format).tolerance_nats for format in cpu_kernels.FORMATS
}
"""Other weights differ by far more"""


async def test_an_engine_that_falls_silent_is_replaced(live, monkeypatch):
    engine = await live()
    deaths, stopped = engine.deaths, []

    def on_token(index, token, logprob):
        if not stopped:
            stopped.append(engine.backend.pid)
            os.kill(engine.backend.pid, signal.SIGSTOP)
            monkeypatch.setattr(engine.backend, "timeout_s", 3.0)
        elif engine.deaths > deaths:
            monkeypatch.undo()

    (done,) = await engine.generate(ask(max_tokens=200), on_token)
    assert engine.deaths == deaths + 1
    assert gap(done, 0) < 2e-4


@pytest.mark.parametrize(
    ("format", "dtype"), [key for key in cpu_kernels.KERNELS if key[0] in cpu_kernels.FORMATS]
)
async def test_an_update_in_flight_is_exact_before_and_after(live, format, dtype):
    tolerance = cpu_kernels.kernel_for(format, dtype).tolerance_nats
    engine = await live(format, kv_on_update="recompute", dtype=dtype)
    weights = published(1, format)
    done = await swapped_after(engine, weights, 30, ask(max_tokens=350))
    assert [(s.version, s.digest) for s in done.spans] == [
        (v, published(v, format).manifest.digest) for v in (0, 1)
    ]
    at = done.spans[0].tokens
    assert gap(done, 0, format, last=at) < tolerance
    assert gap(done, 1, format, first=at) < tolerance
    assert gap(done, 0, format, first=at) > max(1, 2 * tolerance)
    assert gap(done, 1, format, last=at) > max(1, 2 * tolerance)


BELIEVES = "import torch\ntorch.cpu._is_amx_tile_supported = lambda: True\n"


@pytest.fixture
def believes_in_amx(tmp_path, monkeypatch):
    """vLLM's processes take this processor for one with AMX: each runs `sitecustomize` at its start."""
    (tmp_path / "sitecustomize.py").write_text(BELIEVES)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.skipif("int8" not in cpu_kernels.FORMATS, reason="this processor lacks VNNI")
async def test_int8_in_float32_runs_where_vllm_sees_amx(believes_in_amx):
    """SGL's product, which vLLM would take, ends the engine at the first token: it refuses float32. Only the
    choice is tested; AMX's own instructions run where the processor has them."""
    async with serving(vllm_engine(VllmEngine(slots=64)), published(0, "int8")) as engine:
        for version in (0, 1):
            await engine.load_weights(published(version, "int8"))
            (done,) = await engine.generate(ask(seed=version))
            assert gap(done, version, "int8") < TOLERANCE["int8"]
        assert engine.deaths == 0


@pytest.mark.parametrize("step", ["stage", "pause"])
async def test_a_swap_ends_when_the_engine_is_killed(live, monkeypatch, step):
    """Nothing else would end it: no answer comes, and its time is a day."""
    engine = await live()
    backend, deaths = engine.backend, engine.deaths
    real = getattr(backend, step)

    async def kill_first(*arguments):
        monkeypatch.undo()
        monkeypatch.setattr(backend, "timeout_s", 86400.0)
        os.kill(backend.pid, signal.SIGKILL)
        await real(*arguments)

    monkeypatch.setattr(backend, step, kill_first)
    await engine.load_weights(published(1))
    assert engine.deaths == deaths + 1 and engine.version == 1
    (done,) = await engine.generate(ask())
    assert gap(done, 1) < 2e-4


async def test_the_shared_memory_of_the_engine_is_noted(live):
    """Whoever starts after a `kill -9` of all its processes removes it."""
    engine = await live()
    noted = (engine.backend._directory.path / SEGMENTS).read_text().split()[::2]
    assert noted and all((SHARED_MEMORY / name).exists() for name in noted)


async def test_a_model_of_32768_positions_starts_by_default():
    """Its KV cache takes 512 MiB for one sequence of that length, and vLLM starts with no less."""
    shape = replace(CONFIG, layers=8, head_dim=64, kv_heads=4, max_positions=32768)
    model = Decoder(shape)
    init_weights(model, 0)
    weights = pack_version(
        quantize_state(model.state_dict(), "bf16"), run="r", epoch="e", version=0, format="bf16",
        uaq_scale=1.0, model=shape.to_hf(), published_s=0.0,
    )  # fmt: skip
    async with serving(vllm_engine(VllmEngine(slots=4)), weights) as engine:
        (done,) = await engine.generate(ask(max_tokens=4))
        assert len(done.response_ids) == 4
        with pytest.raises(RecordError, match="maximum context length is 32768 tokens"):
            await engine.generate(ask(max_tokens=32768))


def test_heads_are_those_that_vllm_says():
    attention = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    says = attention.CPUAttentionBackend.get_supported_head_sizes()
    assert list(cpu_kernels.HEADS) == says


async def test_a_start_that_vllms_core_refuses_is_told_and_met_once(monkeypatch):
    module = "rollout.engines.vllm_backend.vllm_engine.cache_for"
    monkeypatch.setattr(module, lambda *_: Cache(bytes=1 << 12, positions=CONFIG.max_positions))
    engine = vllm_engine(VllmEngine(slots=4))
    await engine.start()
    try:
        with pytest.raises(ConfigError, match=r"the model: ValueError: .*cache"):
            await engine.load_weights(published(0))
        assert engine.deaths == 0
    finally:
        await engine.close()


async def test_a_seed_draws_the_same_after_a_prompt_in_parts():
    """Each part yields a token that is discarded. Asked again, the prompt takes one step: all but its end is
    cached."""
    shape = replace(CONFIG, max_positions=8192)
    weights = pack_version(
        published(0).tensors, run="r", epoch="e", version=0, format="bf16", uaq_scale=1.0,
        model=shape.to_hf(), published_s=0.0,
    )  # fmt: skip
    prompt = np.random.default_rng(1).integers(0, shape.vocab_size, 8000).tolist()
    async with serving(vllm_engine(VllmEngine(slots=4)), weights) as engine:
        step = engine.backend._llm.vllm_config.scheduler_config.max_num_batched_tokens
        assert step < len(prompt) / 2
        (in_parts,), (at_once,) = [
            await engine.generate(ask(prompt, max_tokens=12)) for _ in range(2)
        ]
        assert engine.deaths == 0
        assert in_parts.response_ids.tolist() == at_once.response_ids.tolist()
        np.testing.assert_allclose(in_parts.logprobs, at_once.logprobs, atol=2e-4)


async def test_equal_logits_leave_no_more_than_top_k(live):
    """Every token has a twin, so that one of two equal logits is the fifth."""
    engine = await live()
    tensors = dict(published(0).tensors)
    embedding = "model.embed_tokens.weight"
    tensors[embedding] = tensors[embedding][::2].repeat_interleave(2, 0)
    await engine.load_weights(packed(tensors, 1))
    for top_p in (1.0, 0.9):
        asked = replace(ask(samples=8, top_k=5, top_p=top_p), masked=True)
        sizes = [len(i) for c in await engine.generate(asked) for i in c.sampling_mask]
        assert max(sizes) == 5 and (min(sizes) == 5) == (top_p == 1)
        alone = await engine.generate(asked)
        beside, _ = await asyncio.gather(
            engine.generate(asked), engine.generate(ask(seed=1, samples=8, top_k=25))
        )
        for one, other in zip(alone, beside, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()


async def test_int8_stays_finite_and_right_after_many_reloads(live):
    """oneDNN keeps a bare pointer to the scales, which a reload frees: without the copy, NaN."""
    engine = await live("int8", kv_on_update="recompute")
    for version in (1, 2, 3, 4, 5):
        await engine.load_weights(published(version, "int8"))
        (done,) = await engine.generate(ask(seed=version))
        assert gap(done, version, "int8") < TOLERANCE["int8"]
        assert gap(done, version - 1, "int8") > 1


async def test_a_format_that_vllm_runs_unquantized_is_refused(live):
    engine = await live("int8", kv_on_update="recompute")
    linears = (await engine.backend._llm.collective_rpc("areal_linears"))[0]
    assert len(linears) == 4 * CONFIG.layers
    check_quantized("vLLM", linears, "int8")
    with pytest.raises(EngineDied, match="bf16: vLLM runs"):
        check_quantized("vLLM", linears, "bf16")
    one_is_not = linears | {next(iter(linears)): "UnquantizedLinearMethod"}
    with pytest.raises(EngineDied, match=r"int8: vLLM runs .* as UnquantizedLinearMethod"):
        check_quantized("vLLM", one_is_not, "int8")
    with pytest.raises(EngineDied, match="nothing"):
        check_quantized("vLLM", {}, "int8")


async def test_a_temperature_beyond_vllms_is_refused_by_name(live, make_run):
    engine = await live()
    for temperature in (2.5, 0.005):
        with pytest.raises(
            RecordError, match=f"temperature = {temperature}: vLLM takes 0, or 0.01"
        ):
            await engine.generate(ask(temperature=temperature))
    assert await engine.generate(ask(temperature=2.0))
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature = 2\.5: vLLM takes 0"):
        make_run("rollout.engine.type=vllm", "rollout.sampling.temperature=2.5")


async def test_an_fp8_cache_is_rescaled_for_every_version(live):
    engine = await live("int8", kv_on_update="recompute", kv_cache="fp8")
    scales = await engine.backend._llm.collective_rpc("areal_scales")
    await engine.generate(ask())
    await engine.load_weights(published(1, "int8"))
    after = await engine.backend._llm.collective_rpc("areal_scales")
    assert all(0 < s < 0.2 for layer in after[0].values() for s in layer)
    assert scales != after
    (done,) = await engine.generate(ask())
    assert 1e-3 < gap(done, 1, "int8") < 0.6


CHILD = """
import asyncio, sys

async def main():  # vLLM's processes import this file too; a module of theirs must not be numba
    sys.path[:0] = {paths!r}
    import test_vllm
    from areal_q.config import VllmEngine
    engine = test_vllm.vllm_engine(VllmEngine(slots=4))
    await engine.start()
    await engine.load_weights(test_vllm.published(0))
    print(engine.backend.pid, flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_parent_that_ends_as_it_is_looked_at_ends_the_search(monkeypatch):
    """The thread that looks for them ended with it, and nobody ended vLLM's processes after their worker."""
    from rollout.engines.vllm_backend.worker_extension import ancestors

    def ends(path: Path) -> str:
        raise ProcessLookupError(path)

    monkeypatch.setattr(Path, "read_text", ends)
    assert list(ancestors(os.getpid())) == []


async def test_a_cancellation_beside_vllms_answer_is_not_lost():
    """A worker that was told to end in that turn of the loop went on for ever."""
    backend = VllmBackend(VllmEngine())
    answer = asyncio.get_running_loop().create_future()
    asks = asyncio.ensure_future(backend._answer(answer, "process id"))
    await asyncio.sleep(0)
    answer.set_result(1)
    asks.cancel()
    await asyncio.wait([asks])
    assert asks.cancelled()


def test_kill_9_of_the_worker_leaves_no_engine_behind(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(paths=[os.path.dirname(__file__), str(ROOT / "tests")]))
    child = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        child.kill()
        child.wait()
        deadline = time.monotonic() + 120
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("format", ["bf16", "int8", "int4", "fp8-channel"])
def test_plain_vllm_loads_what_areal_q_quantize_writes(tmp_path, format):
    if format not in cpu_kernels.FORMATS:
        pytest.skip(f"vLLM does not compute {format} on this processor")
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    init_weights(model, 0)
    save_decoder(model, tmp_path / "source")
    quantize(tmp_path / "source", tmp_path / "made", format, torch.bfloat16)
    program = f"""
        from vllm import LLM, SamplingParams
        if __name__ == "__main__":
            llm = LLM({str(tmp_path / "made")!r}, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
                      skip_tokenizer_init=True)
            params = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
            print("DRAWN", llm.generate([dict(prompt_token_ids={PROMPT})], params)[0].outputs[0].token_ids)
    """
    script = tmp_path / "plain.py"
    script.write_text(textwrap.dedent(program))
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    said = subprocess.run(
        [sys.executable, script], env=os.environ | environment, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr[-2000:]
    ids = [int(x) for x in re.findall(r"\d+", said.stdout.partition("DRAWN ")[2])]
    reference = Qwen3ForCausalLM(Qwen3Config(**CONFIG.to_hf())).eval()
    state = dequantize_state(quantize_state(model.state_dict(), format), format)
    state = {name: tensor.float() for name, tensor in state.items()}
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1]
    # Activations are rounded by some formats: the token drawn is the most likely one, or all but.
    assert (logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).max() < 0.1
