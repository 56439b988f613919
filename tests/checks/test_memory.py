"""The parts of a process's memory, beside a count by hand, what torch keeps, and what whole runs took."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kinds import HALF_A_BILLION, M20, QUICKSTART, SMOLLM2
from helpers.strategies import grouped
from msgspec import structs

from areal_q.checks import memory
from areal_q.checks.memory import (
    PROCESS_BYTES,
    learner_memory,
    linear_weights,
    total,
    worker_memory,
)
from areal_q.checks.pass_memory import Lengths, pass_memory
from areal_q.config import Run, TorchEngine, load
from areal_q.models import Decoder, DecoderConfig, PackedLayout, init_weights
from areal_q.models.config import DeltaRule
from areal_q.models.low_bit.bf16_rounding import round_rest
from areal_q.models.low_bit.quantized_forward import QuantLinear, use

SMALL = DecoderConfig(
    family="qwen3", vocab_size=260, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48,
    max_positions=64,
)  # fmt: skip
AVX2 = {"avx2", "fma"}
SUMS = [
    "learner.groups=4", "learner.group_size=8", "learner.minibatches=1", "learner.max_lag=2",
    "learner.dtype=float32", "rollout.unquantized=bf16", "rollout.engine.slots=96", "rollout.smoothing=off",
    "rollout.sampling.max_tokens=24",
]  # fmt: skip
"""configs/smollm2-sums.toml"""


@pytest.fixture(autouse=True)
def _old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs below were on processors without AVX-512, unless they say so."""
    for module in ("memory", "automatic"):
        monkeypatch.setattr(f"areal_q.checks.{module}.cpu_flags", lambda: AVX2)


def by_name(parts: Any) -> dict[str, float]:
    return {part.name: part.nbytes for part in parts}


def test_parts_are_counted_as_by_hand():
    """Embedding [260, 32], q and o [32, 32], k and v [16, 32], MLP [48, 32]; three norms of 32, two of 16."""
    linears = 2 * 32**2 + 2 * 16 * 32 + 3 * 32 * 48
    weights = linears + 260 * 32 + 3 * 32 + 2 * 16
    small = [
        "learner.groups=2",
        "learner.group_size=3",
        "learner.max_lag=0",
        "learner.minibatches=1",
    ]
    small += ["rollout.sampling.max_tokens=8", "rollout.format=bf16", "rollout.unquantized=fp32"]
    run = load(None, small)
    learner = by_name(learner_memory(run, SMALL, Lengths(10, 8)))
    payload = 2 * linears + 4 * (weights - linears)
    assert learner["process"] == PROCESS_BYTES
    assert learner["weights"] == learner["gradients"] == 4 * weights
    assert learner["moments"] == 8 * weights
    assert (
        learner["published versions"] == (3 + 2) * payload
    )  # broadcast.hold is more than max_lag + 2
    tokens, padded = 2 * (10 + 3 * 7), 6 * 17
    attention = padded * 2 * (32 + 16)
    assert learner["activations"] == 4 * (tokens * (7 * 32 + 4 * 48) + attention)
    worker = by_name(worker_memory(run, SMALL, Lengths(10, 8)))
    assert worker["received versions"] == 4 * payload
    assert worker["weights laid out"] == 3 * 4 * weights
    assert worker["KV cache"] == 2 * (2 * 3 * (10 + 8) * 2 * 16 * 4)


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ([], 2 * 108 * 32 * 4),
        (["device=cuda"], 2 * 108 * 32 * 4),
        (["kv_cache=fp8"], 2 * 108 * 32),
        (["kv_cache_bytes=9999"], 9999),
        (["kv_cache_bytes=99999"], 2 * 108 * 32 * 4),
        (["type=hf"], 108 * 32 * 4),
        (["type=vllm"], 108 * 32 * 2),
        (["type=vllm", "dtype=float32"], 108 * 32 * 4),
        (["type=vllm", "kv_cache=fp8", "kv_on_update=recompute"], 108 * 32),
    ],
)
def test_the_cache_is_counted_as_the_engine_holds_it(settings: list[str], nbytes: int):
    """Of 108 positions of 32 numbers; the torch engine keeps as many pages again for later prompts."""
    small = ["learner.groups=2", "learner.group_size=3", "learner.max_lag=0"]
    small += ["learner.minibatches=1", "rollout.sampling.max_tokens=8"]
    run = load(None, [*small, *(f"rollout.engine.{setting}" for setting in settings)])
    assert by_name(worker_memory(run, SMALL, Lengths(10, 8)))["KV cache"] == nbytes


def test_gpus_of_an_engine_share_its_weights_and_its_cache():
    """Heads of keys and values are whole: four GPUs have no less of two heads than two have."""
    shape = structs.replace(SMALL, kv_heads=2)

    def parts(gpus: int) -> dict[str, float]:
        run = load(None, ["rollout.engine.type=vllm", f"rollout.engine.tensor_parallel={gpus}"])
        return by_name(worker_memory(run, shape, Lengths(10, 8)))

    one, two, four = parts(1), parts(2), parts(4)
    for name, nbytes in one.items():
        divided = {"the engine's weights": (2, 4), "KV cache": (2, 2)}.get(name, (1, 1))
        assert (two[name], four[name]) == (nbytes / divided[0], nbytes / divided[1])


@pytest.mark.parametrize(("format", "served"), [("bf16", 2), ("int8", 1)])
def test_an_engine_in_float32_takes_four_bytes_where_it_took_two(format: str, served: int):
    def parts(dtype: str) -> dict[str, float]:
        settings = ["rollout.engine.type=sglang", f"rollout.engine.dtype={dtype}"]
        run = load(None, [*settings, f"rollout.format={format}", "learner.uaq=1"])
        return by_name(worker_memory(run, SMALL, Lengths(10, 8)))

    two, four = parts("auto"), parts("float32")
    wide = SMALL.weights - (linear_weights(SMALL) if served == 1 else 0)
    assert four["the engine's weights"] - two["the engine's weights"] == 2 * wide
    assert four["handed over"] == two["handed over"]


def test_adapters_added_for_sglang_are_handed_over_whole():
    settings = ["rollout.engine.type=sglang", "rollout.engine.dtype=float32", "rollout.format=bf16"]
    run = load(None, [*settings, "learner.lora={}", "learner.uaq=1"])
    assert by_name(worker_memory(run, SMALL, Lengths(10, 8)))["handed over"] == 8 * SMALL.weights


def test_transformers_computes_a_prompt_for_each_response():
    """By hand, as above; layers never run in our fused pass."""
    settings = ["learner.groups=2", "learner.group_size=3", "learner.minibatches=1"]
    settings += ["learner.dtype=bfloat16", "model.type=hf", "model.path=none"]
    found = by_name(pass_memory(load(None, settings), SMALL, Lengths(10, 8)))["activations"]
    assert found == 4 * 6 * 17 * (7 * 32 + 4 * 48 + 2 * (32 + 16))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["learner.optimizer.type=adamw8bit"], {"moments": 2}),
        (["learner.optimizer.type=muon"], {"moments": 4}),
        (["learner.reference_kl={coef=0.1}"], {"reference": 4}),
        (
            ["learner.critic={}", "learner.advantage.type=gae", "learner.group_size=1"],
            {"critic": 16},
        ),
    ],
)
def test_what_settings_add_is_counted(settings: list[str], expected: dict[str, int]):
    parts = by_name(learner_memory(load(None, settings), SMALL, Lengths(8, 8)))
    assert {name: parts[name] / SMALL.weights for name in expected} == expected


def test_a_teacher_beside_the_policy_is_counted_by_its_own_shape(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(M20.to_hf()))
    run = load(None, [f"learner.teacher={{type='model', path='{tmp_path}'}}"])
    parts = by_name(learner_memory(run, SMALL, Lengths(8, 8)))
    assert parts["teacher"] == 4 * M20.weights


def test_adapters_alone_have_gradients_and_moments():
    run = load(None, ["learner.lora={rank=4, targets=['q_proj']}", "rollout.format=nf4"])
    parts = by_name(learner_memory(run, SMALL, Lengths(8, 8)))
    assert parts["gradients"] == 4 * 4 * (32 + 32) and parts["moments"] == 2 * parts["gradients"]
    linears = 32 * (2 * 32 + 2 * 16 + 3 * 48)  # the rest is as it was loaded
    assert parts["weights"] == 0.57 * linears + 4 * (SMALL.weights - linears) + parts["gradients"]


def test_ranks_that_share_tokens_keep_a_share_of_a_pass():
    """Of a response that is longer than any of them could take alone; keys and values of a head are whole."""

    def activations(context: int, tokens: int) -> float:
        settings = [f"learner.backend.context={context}", f"learner.microbatch_tokens={tokens}"]
        run = load(None, [*settings, "learner.dtype=float32"])
        return by_name(pass_memory(run, SMALL, Lengths(1000, 3000)))["activations"]

    whole_head = 2 * SMALL.head_dim * 4 * 4000
    expected = activations(1, 4000) / 4 + whole_head * 3 / 4
    assert activations(4, 1000) == pytest.approx(expected, rel=1e-3)


def test_ranks_share_what_is_sharded_and_nothing_else():
    run = load(None, ["learner.device=cuda", "learner.dtype=bfloat16"])
    one, four = (list(learner_memory(run, SMALL, Lengths(8, 8), ranks)) for ranks in (1, 4))
    alone, shared = by_name(one), by_name(four)
    for name in ("weights", "gradients", "moments"):
        assert shared[name] == alone[name] / 4
    assert shared["activations"] == alone["activations"]
    assert {p.name for p in four if not p.on_gpu} == {
        "process",
        "published versions",
        "copy on the host",
    }


@pytest.mark.parametrize(
    ("settings", "whole"),
    [
        ([], 1),
        (["learner.reference_kl.coef=0.1"], 2),
        (["learner.reference_kl.coef=0.1", "learner.lora.rank=4", "rollout.format=nf4"], 1),
        (["learner.critic.trunk=shared", "learner.advantage.type=gae"], 1),
        (
            [
                "learner.reference_kl.coef=0.1",
                "learner.critic.trunk=separate",
                "learner.advantage.type=gae",
            ],
            3,
        ),
    ],
)
def test_the_first_of_several_holds_every_model_whole(settings: list[str], whole: int):
    """It has a shard of each besides, and alone it has each but once."""
    run, lengths = load(None, settings), Lengths(8, 8)
    several = by_name(learner_memory(run, SMALL, lengths, ranks=2))
    assert several["copy on the host"] == 4 * whole * SMALL.weights
    assert "copy on the host" not in by_name(learner_memory(run, SMALL, lengths))
    gpu = load(None, [*settings, "learner.device=cuda"])
    assert by_name(learner_memory(gpu, SMALL, lengths))["copy on the host"] == 4 * SMALL.weights


def _full(model: Decoder) -> None: ...


def _rounding(model: Decoder) -> None:
    use(QuantLinear, model, "bf16")
    round_rest(model)


def _bfloat16(model: Decoder) -> None:
    model.dtype = torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "prepare"),
    [
        (["learner.dtype=float32"], _full),
        (["learner.dtype=float32", "learner.precision=qarl", "rollout.format=bf16"], _rounding),
        (["learner.dtype=bfloat16"], _bfloat16),
    ],
    ids=["float32", "qarl", "bfloat16"],
)
@pytest.mark.parametrize(
    ("width", "mlp", "heads", "kv_heads", "prompt"), [(96, 256, 3, 1, 20), (64, 128, 2, 2, 60)]
)
def test_activations_are_what_torch_keeps_for_the_backward_pass(
    settings: list[str], prepare: Callable[[Decoder], None], width: int, mlp: int, heads: int,
    kv_heads: int, prompt: int,
):  # fmt: skip
    """Of two and of four layers, whose difference is that of two layers alone."""
    shape = {
        "family": "llama",
        "vocab_size": 64,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 32,
    }
    batch = ["learner.groups=2", "learner.group_size=8", "learner.minibatches=1"]
    run, kept = load(None, [*batch, *settings]), {}
    for layers in (2, 4):
        config = DecoderConfig(**shape, width=width, mlp=mlp, layers=layers, max_positions=256)
        model = Decoder(config)
        init_weights(model, 0)
        prepare(model)
        kept[layers] = saved_bytes(model, grouped([(prompt, [23] * 8)] * 2, "cpu"))
        kept[-layers] = by_name(pass_memory(run, config, Lengths(prompt, 24)))["activations"]
    assert kept[-4] - kept[-2] == pytest.approx(kept[4] - kept[2], rel=0.08)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("key_dim", "prompt", "response"), [(16, 20, 24), (32, 60, 24), (16, 20, 99)]
)
def test_layers_with_a_state_keep_what_is_expected(
    dtype: str, key_dim: int, prompt: int, response: int
):
    """Chunks that are as long as the text, and several of them; of two and of four layers, as above."""
    batch = ["learner.groups=2", "learner.group_size=8", "learner.minibatches=1"]
    run, kept = load(None, [*batch, f"learner.dtype={dtype}"]), {}
    for layers in (2, 4):
        config = DecoderConfig(
            family="qwen3_5_text", vocab_size=64, width=96, layers=layers, heads=2, kv_heads=1, head_dim=32,
            mlp=256, max_positions=256,
            delta=DeltaRule(
                layers=tuple(range(layers)), key_heads=2, value_heads=4, key_dim=key_dim, value_dim=24,
                kernel=4,
            ),
        )  # fmt: skip
        model = Decoder(config)
        init_weights(model, 0)
        model.dtype = getattr(torch, dtype)
        kept[layers] = saved_bytes(model, grouped([(prompt, [response - 1] * 8)] * 2, "cpu"))
        found = by_name(pass_memory(run, config, Lengths(prompt, response)))
        kept[-layers] = found["activations"]
    assert kept[-4] - kept[-2] == pytest.approx(kept[4] - kept[2], rel=0.08)


def test_a_model_of_states_alone_has_an_empty_cache():
    rule = DeltaRule(layers=(0,), key_heads=2, value_heads=4, key_dim=16, value_dim=24, kernel=4)
    shape = structs.replace(SMALL, family="qwen3_5_text", delta=rule)
    run = load(None, ["rollout.engine.kv_cache_bytes=9999"])
    assert by_name(worker_memory(run, shape, Lengths(10, 8)))["KV cache"] == 0
    assert isinstance(run.rollout.engine, TorchEngine)
    assert memory.cached_pages(run.rollout.engine, shape) >= 1


def saved_bytes(model: Decoder, layout: PackedLayout) -> int:
    """Returns the bytes that a forward pass keeps, the parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )  # held, so that no other takes its place
        return tensor

    ids = torch.zeros(len(layout.positions), dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, layout)
    return sum(nbytes for nbytes, _ in seen.values())


MEASURED = [
    (QUICKSTART, ["learner.dtype=float32", "rollout.sampling.max_tokens=5", "rollout.engine.slots=256"], 6,
     1.355e9, 0.597e9),
    (SMOLLM2, [*SUMS, "rollout.format=bf16", "learner.precision=qarl"], 46, 7.44e9, 3.92e9),
]  # fmt: skip
"""Shape, settings, tokens of a prompt, and the largest resident memory (VmHWM) of learner and worker: the
quickstart, 420 steps, and configs/smollm2-sums.toml, 12 steps; two cores of an AMD EPYC without AVX-512"""


@pytest.mark.parametrize(("shape", "settings", "prompt", "learner", "worker"), MEASURED)
def test_whole_runs_took_what_is_expected_within_15_percent(
    shape: DecoderConfig, settings: list[str], prompt: int, learner: float, worker: float
):
    run = load(None, settings)
    lengths = Lengths(prompt, run.rollout.tokens_after_prompt)
    assert total(learner_memory(run, shape, lengths)) == pytest.approx(learner, rel=0.15)
    assert total(worker_memory(run, shape, lengths)) == pytest.approx(worker, rel=0.15)


STEPS = ("weights", "gradients", "moments", "activations", "logits", "the head's gradient")


@pytest.mark.parametrize(
    ("shape", "groups", "size", "lengths", "dtype", "mib"),
    [
        (HALF_A_BILLION, 1, 4, Lengths(64, 448), "bfloat16", 9_900),
        (HALF_A_BILLION, 1, 4, Lengths(64, 448), "float32", 12_109),
        (M20, 3, 8, Lengths(48, 1814 / 24), "bfloat16", 627),
        (M20, 3, 8, Lengths(48, 1814 / 24), "float32", 1_038),
    ],
)
def test_single_steps_took_what_is_expected_within_15_percent(
    shape: DecoderConfig, groups: int, size: int, lengths: Lengths, dtype: str, mib: int
):
    """bench/README.md: the peak of one step beyond what the process had before it loaded the model."""
    batch = [f"learner.groups={groups}", f"learner.group_size={size}", "learner.minibatches=1"]
    run = load(None, [*batch, f"learner.dtype={dtype}"])
    parts = by_name(learner_memory(run, shape, lengths))
    assert sum(parts[name] for name in STEPS) / 2**20 == pytest.approx(mib, rel=0.15)


def test_a_step_on_a_gpu_took_what_is_expected_within_15_percent():
    """docs/gpu.md: 32 sequences of 1,024 tokens at 0.5B in float32, layers computed again: 13.0 GiB."""
    batch = ["learner.groups=32", "learner.group_size=1", "learner.minibatches=1"]
    settings = [
        *batch,
        "learner.advantage={type='reinforce++', baseline='none'}",
        "learner.dtype=float32",
    ]
    run = load(None, [*settings, "learner.device=cuda", "learner.recompute=true"])
    parts = by_name(learner_memory(run, HALF_A_BILLION, Lengths(0, 1024)))
    assert sum(parts[name] for name in STEPS) / 2**30 == pytest.approx(13.0, rel=0.15)


@pytest.mark.parametrize(
    ("flags", "format", "nbytes"),
    [
        (AVX2, "bf16", 4),
        (AVX2, "int8", 4),
        ({"avx512_vnni"}, "int8", 1),
        ({"avx512_bf16"}, "int4", 2),
    ],
)
def test_kernels_take_weights_as_the_processor_multiplies_them(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], format: str, nbytes: int
):
    monkeypatch.setattr("areal_q.checks.memory.cpu_flags", lambda: flags)
    assert memory.laid_out_bytes(format) == nbytes


def test_a_worker_without_a_model_is_a_process_alone():
    run: Run = load(None, ["rollout.engine.type=scripted"])
    assert total(worker_memory(run, SMALL, Lengths(8, 8))) == PROCESS_BYTES
