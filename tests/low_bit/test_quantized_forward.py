"""The aligned forward: the published numbers, a straight-through gradient, the engine's log-probs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import engines
from helpers.engines import ask
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.policies import build_policy, raw_bytes, save_at
from torch import nn

from areal_q.config import TorchEngine
from areal_q.config.engines import pages_of
from areal_q.config.run import ROUNDS_ACTIVATIONS
from areal_q.errors import ConfigError, QuantizationError
from areal_q.models import Decoder, DecoderConfig, init_weights
from areal_q.models.config import DeltaRule
from areal_q.models.layers.linear import Linear
from areal_q.models.low_bit.bf16_rounding import round_rest
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.models.low_bit.published_state import published_state
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears, use
from areal_q.models.packed_layout import PackedLayout
from areal_q.quant import FORMATS, is_quantized, quantize_state
from areal_q.weights.version import WeightVersion
from bench.records import drawn_trajectory
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import Sample, pack_samples
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder
from rollout.engines.base import Completion
from rollout.engines.reference.inference_model import InferenceModel
from rollout.engines.reference.kv_cache import KVCache, PrefillAttention, PromptPiece
from rollout.engines.reference.ops import TorchOps

QARL = "learner.precision=qarl"


def generate(weights: WeightVersion, prompts: list[np.ndarray], tokens: int) -> list[Completion]:
    requests = [ask(prompt, 4, seed, max_tokens=tokens) for seed, prompt in enumerate(prompts)]
    return [completion for group in engines.generate(weights, *requests) for completion in group]


def as_sample(prompt: np.ndarray, group: int, c: Completion) -> Sample:
    length = len(c.response_ids)
    return Sample(
        ticket=group,
        prompt_ids=prompt,
        trajectory=drawn_trajectory(0, c),
        advantage=1.0,
        lag=np.zeros(length, np.int64),
    )


def drawn_tokens(weights: WeightVersion) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 13, 5).astype(np.int32) for _ in range(12)]
    drawn = generate(weights, prompts, 20)
    return [as_sample(prompts[i // 4], i // 4, c) for i, c in enumerate(drawn)]


def gap_to_learner(policy: TorchPolicy, samples: list[Sample]) -> np.ndarray:
    batch = pack_samples(samples)
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, batch, 1.0)
    return (logprobs - batch.behavior_logprobs).abs().numpy()


@torch.inference_mode()
def gap_to_plain_engine(weights: WeightVersion, samples: list[Sample]) -> np.ndarray:
    """Of the engine to itself: its fused loops against plain torch, whole sequences at once."""
    model = InferenceModel(weights, "cpu", TorchOps())
    found = []
    for s in samples:
        response = torch.tensor(s.trajectory.response_ids.numpy()).long()
        ids = torch.cat((torch.from_numpy(s.prompt_ids).long(), response))
        cache = KVCache(model.config, "cpu")
        piece = PromptPiece(ids.numpy(), 0, cache.take(pages_of(len(ids))))
        prefill = PrefillAttention(cache, [piece])
        logits = model.logits(model.forward(ids, torch.arange(len(ids)), prefill))
        logp = logits[len(s.prompt_ids) - 1 : -1].log_softmax(-1)
        now = logp.gather(1, response[:, None]).squeeze(1).numpy()
        found.append(np.abs(now - s.trajectory.behavior_logprobs.numpy()))
    return np.concatenate(found)


LARGER = ["model.width=128", "model.mlp=384", "model.layers=3", "model.max_positions=64"]


@pytest.mark.parametrize("rest", ["fp32", "bf16"])
@pytest.mark.parametrize("format", ["bf16", "int4", "nvfp4", "nf4"])
def test_aligned_learner_has_the_log_probs_of_the_engine(make_run: MakeRun, format: str, rest: str):
    run = make_run(QARL, f"rollout.format={format}", f"rollout.unquantized={rest}", *LARGER)
    policy = build_policy(run)
    gap = gap_to_learner(policy, drawn_tokens(VersionBuilder(run).build(policy.model, 0)))
    assert gap.max() < 1e-4


DELTA = DeltaRule(layers=(0, 2), key_heads=2, value_heads=4, key_dim=8, value_dim=12, kernel=4)
STATES = DecoderConfig(
    family="qwen3_5_text", vocab_size=13, width=32, layers=4, heads=4, kv_heads=2, head_dim=16, mlp=48,
    max_positions=64, tied=False, delta=DELTA, rope_dim=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        [QARL, "rollout.format=bf16", "rollout.unquantized=fp32"],
        [QARL, "rollout.format=int4", "rollout.unquantized=bf16"],
        ["learner.lora={rank=4}", "rollout.format=nf4", "rollout.unquantized=bf16"],
    ],
)
def test_layers_with_a_state_have_the_log_probs_of_the_engine(
    make_run: MakeRun, settings: list[str]
):
    """All that no format applies to, off the numbers that bfloat16 holds."""
    run, model = make_run(*settings), Decoder(STATES)
    init_weights(model, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    set_precision(model, run)
    policy = TorchPolicy(model, run.learner, 1.0)
    weights = VersionBuilder(run).build(policy.model, 0)
    prompts = [np.arange(n).astype(np.int32) % 13 for n in (1, 5, 20)]
    requests = [ask(prompt, 4, max_tokens=20) for prompt in prompts]
    plain = TorchEngine(slots=64, fused=False)
    drawn = engines.generate(weights, *requests, config=plain)
    samples = [
        as_sample(prompt, n, c)
        for n, (prompt, group) in enumerate(zip(prompts, drawn, strict=True))
        for c in group
    ]
    assert gap_to_learner(policy, samples).max() < 1e-5


def test_unquantized_tensors_travel_in_bfloat16_if_asked(make_run: MakeRun):
    model = build_policy(make_run()).model
    kv = {"kv": torch.ones(2)}
    wide, narrow = (
        VersionBuilder(make_run(f"rollout.unquantized={rest}")).build(model, 0, kv).tensors
        for rest in ("fp32", "bf16")
    )
    assert wide.keys() == narrow.keys()
    for name, tensor in wide.items():
        quantized = name.endswith("_proj.weight") or name.endswith("_scale") or name == "kv"
        assert torch.equal(narrow[name], tensor if quantized else tensor.bfloat16())
        assert narrow[name].dtype == (tensor.dtype if quantized else torch.bfloat16)


def test_forward_on_rounded_tensors_has_the_masters_gradient(make_run: MakeRun):
    run = make_run(QARL, "rollout.unquantized=bf16")
    model = build_policy(run).model
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms, all of them, with weights that bfloat16 does not hold
                p.add_(torch.randn_like(p) * 0.1)
    ids, layout = torch.arange(10), PackedLayout.of([6, 4])

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.logits(model(ids, layout)).square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    rounding = gradients()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not is_quantized(name):
                p.copy_(p.bfloat16())
    round_rest(model, False)
    plain = gradients()
    assert rounding.keys() == plain.keys() == dict(model.named_parameters()).keys()
    for name, grad in plain.items():
        torch.testing.assert_close(rounding[name], grad)


@pytest.mark.timeout(120)  # the first of each format compiles its kernels
@pytest.mark.parametrize("precision", ["full", "qarl", "jet"])
@pytest.mark.parametrize("format", sorted(FORMATS))
def test_each_format_runs_as_published_and_is_learnt(
    make_run: MakeRun, format: str, precision: str
):
    """The cells of docs/models.md: what the engine draws is scored alike by its published weights, and by an
    aligned learner, which then takes a step."""
    if precision == "jet" and format != "fp8":
        with pytest.raises(ConfigError, match=r"needs rollout\.format = 'fp8'"):
            make_run(f"learner.precision={precision}", f"rollout.format={format}")
        return
    run = make_run(f"learner.precision={precision}", f"rollout.format={format}", *LARGER)
    policy, builder = build_policy(run), VersionBuilder(run)
    weights = builder.build(policy.model, 0)
    samples = drawn_tokens(weights)
    batch = pack_samples(samples)
    logprobs, _ = token_logprobs(engine_policy(policy.shape, weights.tensors, format), batch, 1.0)
    far = 1.0 if format in ROUNDS_ACTIVATIONS else 1e-4
    gap = (logprobs - batch.behavior_logprobs).abs().numpy()
    gaps = [gap, gap_to_learner(policy, samples)] if precision == "qarl" else [gap]
    assert all(np.median(gap) < 1e-4 and gap.max() < far for gap in gaps)
    values = update_policy(policy, samples)
    assert np.isfinite(values["train/loss"]) and values["train/grad_norm"] > 0
    assert builder.build(policy.model, 1).manifest.digest != weights.manifest.digest


def test_a_published_tensor_without_a_place_is_refused(make_run: MakeRun):
    """Without it the engine would draw from another policy, and nobody would know."""
    model = build_policy(make_run()).model
    tensors = quantize_state(model.state_dict(), "int8")
    engine_policy(model.config, tensors, "int8")
    with pytest.raises(QuantizationError, match=r"lm_head\.weight is published, and the model has"):
        engine_policy(model.config, {**tensors, "lm_head.weight": torch.ones(2)}, "int8")


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_quantized_activations_differ_as_the_engine_from_itself(make_run: MakeRun, format: str):
    # Where float32 rounding turns the code of an activation, no two orders of summation agree to 1e-4.
    run = make_run(QARL, f"rollout.format={format}", *LARGER)
    policy, plain = build_policy(run), build_policy(make_run(f"rollout.format={format}", *LARGER))
    weights = VersionBuilder(run).build(policy.model, 0)
    samples = drawn_tokens(weights)
    aligned, engine = gap_to_learner(policy, samples), gap_to_plain_engine(weights, samples)
    unaligned = gap_to_learner(plain, samples)
    assert np.median(aligned) < 1e-4
    assert aligned.mean() < 1.5 * engine.mean() + 1e-6
    assert (aligned**2).mean() < (unaligned**2).mean() / 10


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_the_tensors_of_the_forward_are_the_ones_published(make_run: MakeRun, format: str):
    run = make_run(QARL, f"rollout.format={format}")
    policy = build_policy(run)
    published = published_state(policy.model, format)
    for name, linear in linears(policy.model).items():
        assert isinstance(linear, QuantLinear)
        for suffix, tensor in linear.parts.items():
            assert published[f"{name}.{suffix}"] is tensor
    manifest = VersionBuilder(run).build(policy.model, 0).manifest
    plain = make_run(f"rollout.format={format}")
    again = VersionBuilder(plain).build(build_policy(plain).model, 0).manifest
    assert (manifest.digest, manifest.nbytes) == (again.digest, again.nbytes)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_the_gradient_is_that_of_the_layer_in_full_precision(format: str):
    torch.manual_seed(0)
    plain = Linear(160, 96)
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"self_attn": nn.ModuleDict({"q_proj": plain})})])}
    )
    use(QuantLinear, model, format)
    aligned = linears(model)["layers.0.self_attn.q_proj"]
    x, upstream = torch.randn(7, 160), torch.randn(7, 96)
    found = []
    for layer in (plain, aligned):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        found.append(
            (y.detach(), torch.autograd.grad((y * upstream).sum(), [leaf, *layer.parameters()]))
        )
    (exact, wanted), (low, got) = found
    assert not torch.equal(exact, low) and (exact - low).norm() < 0.2 * exact.norm()
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    # Finite differences of what the estimator goes straight through to: the same layer in float64.
    step, weight = 1e-6, plain.weight.detach().double()
    for o, i in [(0, 0), (95, 159), (40, 3)]:
        moved = weight.clone()
        moved[o, i] += step
        change = ((x.double() @ (moved - weight).t()) * upstream.double()).sum() / step
        assert float(got[1][o, i]) == pytest.approx(float(change), rel=1e-3, abs=1e-4)


def test_every_update_quantizes_the_weights_anew(make_run: MakeRun, make_samples: MakeSamples):
    run = make_run(QARL, "rollout.format=nvfp4", "learner.optimizer.lr=0.01", "learner.epochs=2")
    policy = build_policy(run)
    before = published_state(policy.model, "nvfp4")
    update_policy(policy, make_samples(12))
    after = published_state(policy.model, "nvfp4")
    fresh = quantize_state(policy.model.state_dict(), "nvfp4")
    assert all(torch.equal(raw_bytes(after[k]), raw_bytes(fresh[k])) for k in fresh)
    assert not all(torch.equal(raw_bytes(after[k]), raw_bytes(before[k])) for k in fresh)


def test_step_after_a_restore_is_bit_for_bit_the_step_without(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    run = make_run(QARL, "learner.optimizer.lr=0.01", "learner.reference_kl.coef=0.01")
    policy = build_policy(run)
    update_policy(policy, make_samples(12))
    save_at(1, tmp_path, policy)
    resumed = build_policy(run)
    checkpoint.restore(tmp_path, resumed)
    ours, theirs = (
        update_policy(policy, make_samples(12, seed=1)),
        update_policy(resumed, make_samples(12, seed=1)),
    )
    assert ours == theirs
    a, b = (VersionBuilder(run).build(t.model, 2).manifest.digest for t in (policy, resumed))
    assert a == b


def test_a_learner_that_is_not_aligned_has_plain_linears(make_run: MakeRun):
    run = make_run()
    model = build_policy(run).model
    assert {type(linear) for linear in linears(model).values()} == {Linear}
    set_precision(model, make_run(QARL))
    assert {type(linear) for linear in linears(model).values()} == {QuantLinear}
    weights = dict(model.named_parameters())
    set_precision(model, run)
    assert {type(linear) for linear in linears(model).values()} == {Linear}
    assert all(p is weights[n] for n, p in model.named_parameters())


def test_the_critics_own_trunk_stays_in_full_precision(make_run: MakeRun):
    run = make_run(QARL, "learner.critic={}", "learner.advantage.type=gae")
    policy = build_policy(run)
    assert policy.critic and policy.critic.trunk
    assert {type(linear) for linear in linears(policy.critic.trunk).values()} == {Linear}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([QARL, "rollout.sticky_scales=0.1"], "sticky_scales"),
        (["learner.precision=jet"], "needs rollout.format = 'fp8'"),
        (["learner.precision=half"], "learner.precision"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(make_run: MakeRun, settings: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        make_run(*settings)
