"""Scales by channel of models that transformers computes: each linear divides its own input, so that the
function stays the same whatever the layers are, and engines run what is published."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.engines import ask, generate
from helpers.fixture_types import MakeRun, MakeSamples
from helpers.kinds import FAMILIES, VOCAB, upright, write_foreign
from helpers.policies import initial_model, save_at
from helpers.strategies import grouped
from torch import Tensor

from areal_q.config import HfEngine, HfModel, Run, Smoothing
from areal_q.errors import QuantizationError
from areal_q.models import Decoder, PackedLayout, load_model, packed_layout, save_decoder
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.models.smoothed_state import first_folds, measured_inputs
from areal_q.quant import dequantize_state, quantize_state
from areal_q.quant.awq import AwqScales
from areal_q.quant.rescaling import Fold
from areal_q.quant.smoothing import SmoothingScales
from areal_q.quant.state_dict import check_shapes
from areal_q.weights.version import WeightVersion
from learner import checkpoint
from learner.backends.single_device import TorchPolicy
from learner.doctor.probe import VersionPolicies
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2], [3, 8, 4, 6]]
every_family = pytest.mark.parametrize("family", FAMILIES)
Product = Callable[[str, Tensor, Tensor, Tensor | None], Tensor]
"""(name, x, weight, bias) ─▶ what the linear of this name gives out"""


def outlying(at: Path, family: str) -> Any:
    """Writes a model in which norms and linears make one channel in eight thirty times larger."""
    net = write_foreign(at, family)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.dim() == 1 or name.endswith(("up_proj.weight", "v_proj.weight")):
                p[3::8] *= 30.0
    net.save_pretrained(at)
    return net


def loaded(at: Path) -> Decoder:
    return load_model(HfModel(path=str(at)), at)


def folds_for(model: Decoder, format: str = "int8") -> Mapping[str, Fold]:
    return first_folds(model, PROMPTS, Smoothing(), format)


def logits(model: Decoder, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model.logits(model(ids, PackedLayout.of([len(ids)])))


@contextmanager
def computing(net: Any, names: Mapping[str, Any], product: Product) -> Iterator[None]:
    """Gives the linears of transformers' `net` that have these weights the outputs of `product`."""

    def hook(name: str) -> Any:
        def products(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            weight = upright(net.config.model_type, {name: module.weight})[name]
            return product(name, args[0], weight, module.bias)

        return products

    modules = dict(net.named_modules())
    linears = [modules[name.removesuffix(".weight")] for name in names]
    hooks = [m.register_forward_hook(hook(n)) for n, m in zip(names, linears, strict=True)]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@every_family
@torch.no_grad()
def test_a_scaled_model_of_transformers_computes_the_same(family: str, tmp_path: Path) -> None:
    net = outlying(tmp_path, family).double()
    net.set_experts_implementation("eager")  # others have no float64
    folds = folds_for(loaded(tmp_path))

    def scaled(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = folds[name].columns
        assert columns is not None
        return F.linear(x / columns, folds[name].of(weight), bias)

    wanted = net(input_ids=IDS[None]).logits
    with computing(net, folds, scaled):
        found = net(input_ids=IDS[None]).logits
    assert float((found - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())
    moved = sum(int((fold.columns != 1).sum()) for fold in folds.values())  # type: ignore[union-attr]
    assert moved > 40


def by_hand(weights: Mapping[str, Tensor]) -> Product:
    """int8 of `weights` with a scale for each output, of the inputs over s with a scale for each token."""

    def product(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        prefix = name.removesuffix("weight")
        x = x / weights.get(f"{prefix}smoothing", torch.ones(()))
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = (x / scale).round() * scale
        out = codes @ (weights[name].float() * weights[f"{prefix}weight_scale"]).T
        return out if bias is None else out + bias

    return product


@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(32, dtype=torch.float64)])
def test_scales_that_do_not_fit_are_refused(wrong: Tensor, tmp_path: Path) -> None:
    outlying(tmp_path, "phi")
    model = loaded(tmp_path)
    state = model.state_dict()
    weights = quantize_state(state, "int8", folds=folds_for(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_shapes(weights, shapes, "int8")
    name = next(n for n in weights if n.endswith(".smoothing"))
    with pytest.raises(QuantizationError, match=f"{name} is not float32"):
        check_shapes(weights | {name: wrong}, shapes, "int8")


@every_family
@torch.no_grad()
def test_the_engine_runs_the_numbers_that_are_published(family: str, tmp_path: Path) -> None:
    """Beside transformers' own layers around products that are written out here."""
    net = outlying(tmp_path, family)
    model = loaded(tmp_path)
    folds = folds_for(model)
    weights = quantize_state(model.state_dict(), "int8", folds=folds)
    assert {n for n in weights if n.endswith(".smoothing")} == {
        f"{name.removesuffix('weight')}smoothing" for name in folds
    }
    with computing(net, folds, by_hand(weights)):
        wanted = net(input_ids=IDS[None]).logits[0]
    found = logits(engine_policy(model.config, weights, "int8"))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    state = dequantize_state(weights, "int8")
    assert state.keys() == model.state_dict().keys()
    for name in folds:
        bound = weights[f"{name}_scale"] / weights[f"{name.removesuffix('weight')}smoothing"]
        assert bool(((state[name] - model.state_dict()[name]).abs() <= 0.501 * bound).all())


@every_family
@torch.no_grad()
def test_int8_products_are_nearer_where_there_are_outliers(family: str, tmp_path: Path) -> None:
    """Each linear by itself, on the inputs that it has in full precision."""
    net = outlying(tmp_path, family)
    model = loaded(tmp_path)
    found, errors = folds_for(model), list[float]()

    def measured(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        exact = F.linear(x, weight, bias)
        errors[-1] += float((rounded(name, x, weight, bias) - exact).norm() / exact.norm())
        return exact

    for folds in ({}, found):
        rounded = by_hand(quantize_state(model.state_dict(), "int8", folds=folds))
        errors.append(0.0)
        with computing(net, found, measured):
            net(input_ids=IDS[None])
    assert errors[1] < 0.9 * errors[0], errors


@pytest.mark.parametrize("family", ["gemma2", "opt", "bloom", "deepseek_v3"])
@torch.no_grad()
def test_inputs_are_measured_once_a_token_and_without_padding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside transformers' layers on one sequence at a time."""
    monkeypatch.setattr(packed_layout, "WORTH", 1)
    net = write_foreign(tmp_path, family)
    model = loaded(tmp_path)
    model.dtype = torch.bfloat16  # in which the learner may compute
    groups, generator = [(3, (5, 2)), (9, (4,)), (6, (1, 12, 7))], torch.Generator().manual_seed(3)
    ids = torch.randint(2, VOCAB, (sum(p + sum(r) for p, r in groups),), generator=generator)
    layout = grouped(groups)
    found = {
        kind: measured_inputs(model, ids, layout, kind.measure)
        for kind in (SmoothingScales, AwqScales)
    }
    assert model.dtype == torch.bfloat16 and not model.one_pass
    seen: dict[str, list[Tensor]] = {name: [] for name in found[SmoothingScales]}

    def note(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen[name].append(x.reshape(-1, x.shape[-1])[own])
        return F.linear(x, weight, bias)

    begin, known = 0, set[int]()
    with computing(net, seen, note):
        for length in layout.lengths:
            path = layout.paths[begin : begin + length].tolist()
            own = [at for at, token in enumerate(path) if token not in known]
            net(input_ids=ids[path][None])
            known, begin = known | {*path}, begin + length
    assert len(known) == len(ids)
    for name, inputs in seen.items():
        x = torch.cat(inputs)
        wanted = {
            SmoothingScales: x.abs().amax(0),
            AwqScales: torch.stack([x.abs().mean(0), x.square().mean(0)]),
        }
        for kind, want in wanted.items():
            torch.testing.assert_close(found[kind][name], want, atol=1e-4, rtol=1e-4, msg=name)


def run_of(make_run: MakeRun, path: Path, *settings: str) -> Run:
    own = "learner.uaq=1", "rollout.unquantized=bf16", "rollout.smoothing.every=1"
    model = f"model={{type='hf', path='{path}'}}"
    return make_run(model, "rollout.engine.type=hf", *own, *settings)


def policy_of(run: Run) -> TorchPolicy:
    """Returns the policy of a run at its beginning, with scales for PROMPTS."""
    policy = checkpoint.policy_of(initial_model(run), run)
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    policy.smooth(ids, PackedLayout.of([len(prompt) for prompt in PROMPTS]))
    return policy


def version_of(run: Run, policy: TorchPolicy) -> WeightVersion:
    settings = run
    builder = VersionBuilder(settings, policy.sticky, smoothing=policy.smoothing)
    return builder.build(policy.model, 1)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, "int8") for family in FAMILIES),
        *(("phi", format) for format in ("fp8", "fp8-channel", "int4-fp8", "int4", "int4-g32")),
    ],
)
def test_an_aligned_learner_computes_what_it_publishes(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, family: str, format: str
) -> None:
    """Bit for bit, through an update and a measurement; so does the doctor's engine."""
    outlying(tmp_path, family)
    run = run_of(make_run, tmp_path, f"rollout.format={format}", "learner.precision=qarl")
    policy = policy_of(run)
    for step in range(2):
        weights = version_of(run, policy)
        engine = engine_policy(policy.shape, weights.tensors, format)
        assert torch.equal(logits(policy.model), logits(engine))
        update_policy(policy, make_samples(6))
        policy.calibrate_smoothing(make_samples(6), step)
    settings = run
    found = VersionPolicies(policy.model, settings, 1, smoothing=policy.smoothing)
    assert torch.equal(logits(found.engine), logits(policy.model))


@pytest.mark.parametrize("sticky", ["0", "0.05"])
def test_smoothing_leaves_the_learner_and_resumes(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path, sticky: str
) -> None:
    """A delta has hardly any scales, an export none, and the doctor's engine is the one of the rollouts."""
    outlying(tmp_path / "model", "phi3")
    own = "rollout.format=int8", "learner.precision=full", f"rollout.sticky_scales={sticky}"
    run = run_of(make_run, tmp_path / "model", *own)
    policy, plain = policy_of(run), checkpoint.policy_of(initial_model(run), run)
    plain.smoothing = None
    first = version_of(run, policy)
    for step in range(2):
        for one in (policy, plain):
            update_policy(one, make_samples(6))
        policy.calibrate_smoothing(make_samples(6), step)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(policy.model.state_dict()[name], tensor), name
    last = version_of(run, policy)
    scales = [name for name in first.tensors if name.endswith(".smoothing")]
    moved = sum(int((first.tensors[n] != last.tensors[n]).sum()) for n in scales)
    assert moved < 0.1 * sum(first.tensors[n].numel() for n in scales)
    for one, at in ((policy, "smoothed"), (plain, "plain")):
        save_decoder(one.model, tmp_path / at)
    names = "model.safetensors", "config.json"
    read = [(tmp_path / at / n).read_bytes() for n in names for at in ("smoothed", "plain")]
    assert read[0] == read[1] and read[2] == read[3]
    save_at(2, tmp_path / "checkpoints", policy)
    again = checkpoint.policy_of(initial_model(run), run)
    checkpoint.restore(tmp_path / "checkpoints", again)
    assert version_of(run, again).manifest.digest == last.manifest.digest
    settings = run
    found = VersionPolicies(policy.model, settings, 1, policy.sticky, policy.smoothing)
    engine = engine_policy(policy.shape, last.tensors, "int8")
    assert torch.equal(logits(found.engine), logits(engine))
    assert torch.equal(logits(found.learnt), logits(policy.model))
    wanted = dequantize_state(last.tensors, "int8")
    for name, tensor in found.dequantized.state_dict().items():
        assert torch.equal(tensor, wanted[name].float()), name


def test_what_the_engine_draws_has_the_log_probs_of_its_numbers(
    make_run: MakeRun, tmp_path: Path
) -> None:
    outlying(tmp_path, "starcoder2")
    run = run_of(make_run, tmp_path, "rollout.format=int4", "learner.precision=qarl")
    policy = policy_of(run)
    ((drawn,),) = generate(
        version_of(run, policy), ask(IDS.tolist(), max_tokens=12), config=HfEngine(slots=4)
    )
    ids = torch.cat((IDS, torch.from_numpy(drawn.response_ids).long()))
    logp = logits(policy.model, ids).log_softmax(-1)[len(IDS) - 1 : -1]
    ours = logp.gather(1, ids[len(IDS) :, None]).squeeze(1)
    torch.testing.assert_close(ours, torch.from_numpy(drawn.logprobs), atol=1e-5, rtol=0)
