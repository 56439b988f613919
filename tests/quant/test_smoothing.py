"""Smoothing preserves the function bit for bit, changes nothing of the learner's, and makes INT8 nearer; an
aligned forward on smoothed weights has the engine's log-probs to the bit."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import config_of
from helpers.policies import save_at
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from areal_q.config import Run, Smoothing
from areal_q.errors import ConfigError
from areal_q.models import Decoder, PackedLayout, load_decoder, save_decoder
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.models.low_bit.quantized_forward import QuantLinear, use
from areal_q.models.smoothed_state import measured_inputs
from areal_q.quant import FORMATS, dequantize_state, quantize_state
from areal_q.quant.awq import CLIPS, AwqScales, _clips, scales_for
from areal_q.quant.formats.int4 import Int4G32
from areal_q.quant.linears import is_quantized
from areal_q.quant.rescaling import Fold, apply_uaq, pairs_of
from areal_q.quant.smoothing import SmoothingScales, wanted_log2
from areal_q.quant.sticky_scales import StickyRanges
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.doctor.probe import VersionPolicies
from learner.multi_process import join
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "seed_oss": config_of("seed_oss, all biases", SHAPE),
    "one dense layer": Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[0]),
}
LENGTHS = [9, 30, 17]
every_family = pytest.mark.parametrize("family", FAMILIES)


def outlying(family: str, directory: Path) -> Decoder:
    """Returns a decoder with biases and norms that are not trivial, and channels that are up to 100 times
    larger than others before every linear layer."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    theirs.save_pretrained(directory)
    model = load_decoder(directory)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.dim() == 1 else 0.0, 0.3)
        state = model.state_dict()
        for pair in pairs_of(state):
            state[f"{pair.writer}.weight"][3] *= 100.0
    return model


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, 31, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model.model(tokens(), PackedLayout.of(LENGTHS)))


def measured(model: Decoder, format: str = "int8") -> SmoothingScales:
    scales = scales_for(format, Smoothing(), 8)
    inputs = measured_inputs(model, tokens(2), PackedLayout.of(LENGTHS), scales.measure)
    scales.update(model.state_dict(), inputs)
    return scales


def smoothed(model: Decoder, scales: SmoothingScales) -> Decoder:
    new = copy.deepcopy(model)
    state = model.state_dict()
    folds = scales.folds(state)
    new.load_state_dict({n: folds[n].of(t) if n in folds else t for n, t in state.items()})
    return new


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_smoothed_model_computes_the_same(family: str, dtype: torch.dtype, tmp_path: Path):
    model = outlying(family, tmp_path).to(dtype)
    scales = measured(model)
    new = smoothed(model, scales)
    assert sum(int((s != 1).sum()) for s in scales.tensors().values()) > 20
    assert not torch.equal(
        new.state_dict()["model.layers.1.self_attn.o_proj.weight"],
        model.state_dict()["model.layers.1.self_attn.o_proj.weight"],
    )
    wanted = logits(model)
    assert float((logits(new) - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


@every_family
def test_transformers_computes_the_same_as_well(family: str, tmp_path: Path):
    model = outlying(family, tmp_path / "shape")
    both = {"plain": model, "smoothed": smoothed(model, measured(model))}
    found = []
    for name, decoder in both.items():
        save_decoder(decoder, tmp_path / name)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.float64, experts_implementation="eager"
        )
        with torch.no_grad():
            found.append(theirs(tokens()[None]).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_scales_are_those_of_the_formula():
    inputs = torch.tensor([1.0, 4.0, 256.0, 0.0, 4.0])
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 16.0])
    # s = √x / √w: 1, 2, 16, none, ½; the lower median of the four is 1.
    assert wanted_log2(inputs, weights, 0.5).tolist() == [0.0, 1.0, 4.0, 0.0, -1.0]
    # s = x: 1, 4, 256, none, 4, with median 4.
    assert wanted_log2(inputs, weights, 1.0).tolist() == [-2.0, 0.0, 6.0, 0.0, 0.0]


def test_heads_that_share_a_value_head_share_its_scales(tmp_path: Path):
    model = outlying("llama", tmp_path)
    scales = measured(model)
    wide = scales.tensors()["model.layers.0.self_attn.v_proj"]
    assert wide.shape == (16,)
    name = "model.layers.0.self_attn.o_proj.weight"
    ratio = scales.folds(model.state_dict())[name].columns
    assert ratio is not None
    value_0, value_1 = wide.split(8)
    assert torch.equal(ratio, torch.cat([value_0, value_0, value_1, value_1]))


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_folding_while_quantizing_is_folding_before(format: str, sticky: bool, tmp_path: Path):
    model = outlying("qwen2", tmp_path)
    state, folds = model.state_dict(), measured(model).folds(model.state_dict())
    ranges = [StickyRanges(0.05) if sticky and format != "bf16" else None for _ in range(2)]
    published = quantize_state(state, format, ranges[0], folds)
    before = {n: folds[n].of(t) if n in folds else t for n, t in state.items()}
    for name, tensor in quantize_state(before, format, ranges[1]).items():
        assert_same_bits(published[name], tensor, name)


def assert_same_bits(found: Tensor, wanted: Tensor, name: str) -> None:
    assert found.dtype == wanted.dtype, name
    assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)), (
        name
    )


def test_scales_stay_until_they_are_off_by_more_than_four():
    state = {
        "model.layers.0.post_attention_layernorm.weight": torch.ones(2),
        "model.layers.0.mlp.up_proj.weight": torch.ones(3, 2),
        "model.layers.0.mlp.down_proj.weight": torch.ones(2, 3),
    }
    scales = SmoothingScales(Smoothing(alpha=1.0), 1)
    used = []
    for outlier in (16.0, 60.0, 4.5, 65.0, 17.0, 15.0):
        inputs = {
            "model.layers.0.mlp.up_proj.weight": torch.ones(2),
            "model.layers.0.mlp.down_proj.weight": torch.tensor([1.0, 1.0, outlier]),
        }
        scales.update(state, inputs)
        used.append(scales.tensors()["model.layers.0.mlp.up_proj"].tolist()[2])
    assert used == [16.0, 16.0, 16.0, 64.0, 64.0, 16.0]


@every_family
def test_int8_is_nearer_to_a_smoothed_model(family: str, tmp_path: Path):
    model = outlying(family, tmp_path)
    errors = []
    for decoder in (model, smoothed(model, measured(model))):
        quantized = copy.deepcopy(decoder)
        use(QuantLinear, quantized, "int8")
        errors.append(float((logits(quantized) - logits(model)).norm()))
    assert errors[1] < errors[0]


@every_family
@pytest.mark.parametrize("format", ["int4", "int4-g32"])
def test_four_bits_lose_less_with_scales_and_clips(family: str, format: str, tmp_path: Path):
    model = outlying(family, tmp_path)
    state, folds = model.state_dict(), measured(model, format).folds(model.state_dict())
    inputs = measured_inputs(model, tokens(2), PackedLayout.of(LENGTHS), AwqScales.measure)

    def errors(used: Mapping[str, Fold]) -> Tensor:
        found = dequantize_state(quantize_state(state, format, folds=used), format)
        lost = {}
        for pair in pairs_of(state):
            for name in filter(is_quantized, pair.readers):
                fold = used.get(name, Fold())
                # Rows are powers of two, which change no code: only columns are undone.
                gap = found[name] - fold.of(state[name])
                rows, columns = fold.factors(state[name])[::-1]
                gap = gap / rows[:, None] / columns
                lost[pair.writer] = (
                    lost.get(pair.writer, 0) + (gap.square() @ inputs[name][1]).sum()
                )
        return torch.stack(list(lost.values()))

    chosen, plain = errors(folds), errors({})
    assert bool((chosen <= plain * (1 + 1e-5)).all())
    assert float(chosen.sum()) < 0.9 * float(plain.sum())


def test_clips_are_the_best_of_those_tried():
    torch.manual_seed(0)
    weight, counts = torch.randn(6, 2, 32), torch.rand(2, 32) ** 4
    errors = []
    for tried in CLIPS:
        scale = (weight.abs().amax(2, keepdim=True) * tried / 7.5).bfloat16().float()
        rounded = (weight / scale).round().clamp(-8, 7) * scale
        errors.append(((rounded - weight).square() * counts).sum(2))
    best = torch.tensor(CLIPS)[torch.stack(errors).argmin(0)]
    assert torch.equal(_clips(Int4G32(), weight.flatten(1), counts.flatten()), best)
    assert len(best.unique()) > 2


SMOOTH = ("rollout.format=int8", "learner.precision=full", "rollout.smoothing.every=1")


def policy_of(run: Run, directory: Path) -> TorchPolicy:
    policy = TorchPolicy(outlying("qwen3", directory), run.learner, 1.0)
    assert run.rollout.smooths
    policy.smoothing = SmoothingScales(run.rollout.smooths, 8)
    return policy


def test_smoothing_leaves_the_learner_and_resumes(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(*SMOOTH)
    policy = policy_of(run, tmp_path / "hf")
    plain = TorchPolicy(copy.deepcopy(policy.model), run.learner, 1.0)
    builder = VersionBuilder(run, smoothing=policy.smoothing)
    samples = make_samples(12)
    for step in range(2):
        update_policy(policy, samples)
        update_policy(plain, samples)
        policy.calibrate_smoothing(samples, step)
    made = builder.build(policy.model, 1)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor), name
    without = VersionBuilder(run).build(policy.model, 1)
    assert made.manifest.digest != without.manifest.digest
    save_at(2, tmp_path / "checkpoints", policy)
    resumed = policy_of(run, tmp_path / "hf")
    checkpoint.restore(tmp_path / "checkpoints", resumed)
    again = VersionBuilder(run, smoothing=resumed.smoothing)
    assert again.build(resumed.model, 1).manifest.digest == made.manifest.digest


def test_smoothing_composes_with_uaq_and_noise(make_run: MakeRun, tmp_path: Path):
    model = outlying("llama", tmp_path)
    settings = [*SMOOTH[1:], "rollout.format=int8", "rollout.aqn={}", "steps=20"]
    run = make_run(*settings, "learner.uaq=2")
    apply_uaq(model, 2.0)
    scales = measured(model)
    made, plain = (VersionBuilder(run, smoothing=s).build(model, 7) for s in (scales, None))
    name = "model.layers.0.input_layernorm"
    assert not torch.equal(plain.tensors[f"{name}.weight"], model.state_dict()[f"{name}.weight"])
    assert torch.equal(
        made.tensors[f"{name}.weight"] * scales.tensors()[name], plain.tensors[f"{name}.weight"]
    )


@pytest.mark.parametrize("format", ["int8", "int4-g32"])
def test_the_doctor_knows_the_smoothed_weights(format: str, make_run: MakeRun, tmp_path: Path):
    run = make_run(*SMOOTH[1:], f"rollout.format={format}")
    model = outlying("qwen2", tmp_path)
    settings, scales = run, measured(model, format)
    made = VersionBuilder(settings, smoothing=scales).build(model, 0)
    policies = VersionPolicies(model, settings, 0, smoothing=scales)
    published = dequantize_state(made.tensors, format)
    for name, tensor in policies.dequantized.state_dict().items():
        assert torch.equal(tensor, published[name].float()), name


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("rollout.format=nvfp4", "learner.precision=full"), "not with nvfp4"),
        (("rollout.format=fp8", "learner.precision=jet"), "learner.precision = 'jet'"),
        (
            ("rollout.format=int8", "learner.precision=qarl", "learner.backend.type=megatron"),
            "learner.precision = 'qarl' of the Megatron backend",
        ),
        (("rollout.format=int8", "learner.lora={}", "learner.precision=full"), "learner.lora"),
    ],
)
def test_smoothing_is_refused_where_nothing_reads_it(
    settings: tuple[str, ...], reason: str, make_run: MakeRun
):
    with pytest.raises(ConfigError, match=f"rollout.smoothing.*{reason}"):
        make_run(*settings, "rollout.smoothing={}")


ALIGNED = ("learner.precision=qarl", "rollout.smoothing.every=1")


@pytest.fixture
def aligned(make_run: MakeRun, tmp_path: Path) -> Callable[..., tuple[Run, TorchPolicy]]:
    """Returns a function of a family and settings: a run, and its policy with scales of some tokens."""

    def build(family: str, *settings: str) -> tuple[Run, TorchPolicy]:
        run = make_run(*ALIGNED, *settings)
        model = outlying(family, tmp_path / "hf")
        set_precision(model, run)
        policy = TorchPolicy(model, run.learner, 1.0)
        assert run.rollout.smooths
        policy.smoothing = scales_for(run.rollout.format, run.rollout.smooths, 8)
        policy.smooth(tokens(2), PackedLayout.of(LENGTHS))
        return run, policy

    return build


def as_published(run: Run, policy: TorchPolicy) -> Decoder:
    """Returns the policy that an engine runs with the version of `policy`."""
    builder = VersionBuilder(run, smoothing=policy.smoothing)
    made = builder.build(policy.model, 0)
    return engine_policy(policy.shape, made.tensors, run.rollout.format)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ["int8", "fp8-channel", "fp8", "int4-g32"])
@pytest.mark.parametrize("rest", ["fp32", "bf16"])
def test_the_smoothed_forward_is_the_engines(family: str, format: str, rest: str, aligned):
    run, policy = aligned(family, f"rollout.format={format}", f"rollout.unquantized={rest}")
    scales = policy.smoothing.tensors().values()
    assert sum(int((s != 1).sum()) for s in scales) > 20
    assert torch.equal(logits(policy.model), logits(as_published(run, policy)))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_it_stays_so_through_updates_and_a_resumption(
    format: str, aligned, make_samples: MakeSamples, tmp_path: Path
):
    settings = f"rollout.format={format}", "learner.reference_kl={}"
    run, policy = aligned("qwen2", *settings)
    samples = make_samples(12)
    for step in range(2):
        update_policy(policy, samples)
        policy.calibrate_smoothing(samples, step)
        assert torch.equal(logits(policy.model), logits(as_published(run, policy)))
    save_at(2, tmp_path / "checkpoints", policy)
    _, resumed = aligned("qwen2", *settings)
    checkpoint.restore(tmp_path / "checkpoints", resumed)
    for one, other in ((resumed.model, policy.model), (resumed.reference, policy.reference)):
        assert torch.equal(logits(one), logits(other))


@pytest.mark.parametrize("format", ["int8", "int4-g32"])
def test_the_doctors_engine_is_the_smoothed_forward(format: str, aligned):
    run, policy = aligned("qwen3", f"rollout.format={format}")
    found = VersionPolicies(policy.model, run, 0, smoothing=policy.smoothing)
    for model in (found.learnt, found.noisy, found.engine):
        assert torch.equal(logits(model), logits(policy.model))


def test_ranks_without_the_scales_are_refused(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"rollout\.smoothing with learner\.precision: not with 2"
    ):
        join(make_run(*ALIGNED, "rollout.format=int8"))
