"""What runs on a GPU, on a device that is none but keeps its rules (second_device.py): the CPU's results, and
no tensors of two devices in one operation."""

import asyncio
import copy
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from saved import save_at
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from areal_q.config import LearnerConfig, Run, Sampling, TorchEngine, dump_toml
from areal_q.messages import Array, Group, Noise, Ticket, VersionSpan
from areal_q.metrics import MetricsLog
from areal_q.models import (
    Decoder,
    DecoderConfig,
    Experts,
    init_weights,
    load_decoder,
    save_decoder,
)
from areal_q.models.logprobs import blockwise
from areal_q.models.packing import PackedLayout
from areal_q.models.peft import save_adapted
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.aqn import with_noise
from areal_q.quant.linear import int8_matmul
from areal_q.quant.sticky import StickyRanges
from areal_q.quant.uaq import apply_uaq
from areal_q.tasks import build_task, build_tokenizer
from areal_q.weights import WeightVersion
from areal_q.weights import pack as pack_weights
from bench.gpu_sections import SECTIONS
from buffer.log import TrajectoryLog
from buffer.steps import StepLog, StepRecord
from learner import checkpoint
from learner.build import build_model, build_trainer
from learner.doctor_probe import Probe
from learner.fidelity import FidelityMeter
from learner.lineage import Lineage
from learner.outlet import Outlet
from learner.precision import set_precision
from learner.publish import Publisher
from learner.replay_compare import compare
from learner.replay_steps import Replay
from learner.rescore import Scorer, engine_policy
from learner.step import learn
from learner.tap import TokenTap
from learner.trainer import Trainer
from learner.warmstart import supervised_loss
from rollout.engines import build_engine
from rollout.engines.base import Request

if not shutil.which("c++"):
    pytest.skip("no C++ compiler for the second device's guard", allow_module_level=True)
from second_device import Far, SecondDevice

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list]


def refusals() -> dict[str, Callable[[], Any]]:
    """What CUDA refuses."""
    far, near = torch.randn(3, 4, device="cuda"), torch.randn(3, 4)
    at = torch.tensor([1, 2])
    return {
        "sum": lambda: far + near,
        "near sum in place": lambda: near.add_(far.sum()),
        "far sum in place": lambda: far.add_(near),
        "product": lambda: far @ near.t(),
        "linear": lambda: torch.nn.functional.linear(far, near),
        "cat": lambda: torch.cat((far, near)),
        "near table, far index": lambda: near[at.to("cuda")],
        "gather": lambda: far.gather(0, at[:, None]),
        "embedding": lambda: torch.nn.functional.embedding(at, far),
        "index_select": lambda: far.index_select(0, at),
        "put near values": lambda: far.index_put_((at,), near[:2]),
        "bucketize": lambda: torch.bucketize(far, torch.arange(3.0)),
        "numpy": lambda: far.numpy(),
        "generator": lambda: far.normal_(generator=torch.Generator()),
        "norm": lambda: torch.nn.functional.rms_norm(far, (4,), near[0]),
        "where": lambda: torch.where(far > 0, near, 0.0),
    }


@pytest.mark.parametrize("what", range(16))
def test_the_device_refuses_what_torchs_fake_one_and_cuda_refuse(
    what: int, cuda: SecondDevice
) -> None:
    name, refused = list(refusals().items())[what]
    with pytest.raises((RuntimeError, TypeError), match=r"same device|numpy|generator"):
        pytest.fail(f"{name}: {refused()}")
    if name not in ("near table, far index", "generator"):  # these by CUDA's kernels alone
        with FakeTensorMode(), pytest.raises(RuntimeError):
            refusals()[name]()


def test_the_device_does_what_cuda_does(cuda: SecondDevice) -> None:
    far, number, at = torch.arange(6.0, device="cuda"), torch.tensor(2.0), torch.tensor([1, 2])
    assert (far * number + number)[at].tolist() == [4, 6]
    far[at] = number
    far[far > 4] = 0
    far[:1].copy_(torch.ones(1))
    assert far.tolist() == [1, 2, 2, 3, 4, 0]
    assert isinstance(number + far.sum(), Far) and float(far.sum().cpu()) == 12
    # A GPU divides by a number as a product with its reciprocal, and by its own tensors truly.
    x = torch.arange(1.0, 1000.0)
    by_number, by_own = x.to("cuda") / 127.0, x.to("cuda") / torch.full((), 127.0, device="cuda")
    assert not torch.equal(by_number.cpu(), x / 127.0) and torch.equal(by_own.cpu(), x / 127.0)


def test_waits_are_counted_where_they_are(cuda: SecondDevice) -> None:
    x = torch.ones(4).to("cuda", non_blocking=True)
    assert not cuda.waits
    _ = x.to("cpu"), x[x > 0], float(x.sum()), x.nonzero(), torch.ones(2).to("cuda")
    kinds = [place.split()[-1] for place in cuda.waits.elements()]
    assert kinds == ["read", "bool", "_local_scalar_dense", "nonzero", "upload"]
    assert all(place.startswith("tests/test_second_device.py:") for place in cuda.waits)


READ_BY_THE_HOST = ("weight_shape", "weight.quant_state.bitsandbytes__nf4")


@pytest.fixture
def cuda() -> Iterator[SecondDevice]:
    with SecondDevice().present() as device:
        yield device


def same_bits(far: Tensor, near: Tensor) -> bool:
    assert isinstance(far, Far) and not isinstance(near, Far)
    a, b = (x.reshape(-1).view(torch.uint8) for x in (far.cpu(), near))
    return far.dtype == near.dtype and far.shape == near.shape and torch.equal(a, b)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_the_same_bits_on_both_devices(name: str, cuda: SecondDevice) -> None:
    torch.manual_seed(0)
    format = FORMATS[name]
    weight, x, add = torch.randn(96, 200) * 0.02, torch.randn(32, 200), torch.randn(32, 192)
    weight[0, 0], weight[5] = 3.0, 0.0
    near, far = format.quantize(weight, "w"), format.quantize(weight.to("cuda"), "w")
    for suffix in format.suffixes:
        if suffix in READ_BY_THE_HOST:
            assert torch.equal(far[suffix], near[suffix])
        else:
            assert same_bits(far[suffix], near[suffix]), suffix
    assert same_bits(format.dequantize(far), format.dequantize(near))
    assert same_bits(format.error_bound(far), format.error_bound(near))
    want, got = format.linear([near, near]), format.linear([far, far])
    assert same_bits(got(x.to("cuda"), add.to("cuda")), want(x, add))
    rows = torch.tensor([5, 0, 100])
    assert same_bits(got.rows(rows.to("cuda"))(x.to("cuda")), want.rows(rows)(x))


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_an_int8_product_is_exact_for_any_number_of_rows(rows: int, cuda: SecondDevice) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-127, 128, (n, 2048), dtype=torch.int8) for n in (rows, 24))
    found = int8_matmul(a.to("cuda"), b.to("cuda").t())
    assert torch.equal(found.cpu().double(), a.double() @ b.double().t())
    assert int8_matmul(a[:, :2047].to("cuda"), b[:, :2047].to("cuda").t()).shape == (rows, 24)


def test_sticky_scales_uaq_and_noise_are_the_same(cuda: SecondDevice) -> None:
    near = small_model().state_dict()
    far = {name: t.to("cuda") for name, t in near.items()}
    policies = StickyRanges(0.1), StickyRanges(0.1)
    for factor in (1.0, 1.03, 2.0):  # measured, kept, chosen anew
        published = [
            quantize_state({n: t * factor for n, t in state.items()}, "int8", policy)
            for state, policy in zip((far, near), policies, strict=True)
        ]
        assert all(same_bits(published[0][name], t) for name, t in published[1].items())
    again = StickyRanges(0.1)
    again.restore(policies[0].tensors())
    assert all(same_bits(t, policies[1].tensors()[n]) for n, t in again.tensors().items())
    apply_uaq(far, 2.0)
    apply_uaq(near, 2.0)
    noise = Noise(sigma=0.01, seed=5)
    noisy = with_noise(far, noise, 2.0), with_noise(near, noise, 2.0)
    assert all(same_bits(noisy[0][name], t) for name, t in noisy[1].items())


SHAPES = {
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "tied": False},
    "moe": {"family": "qwen3_moe", "experts": Experts(count=4, per_token=2, mlp=16)},
}


def small_model(kind: str = "qwen3") -> Decoder:
    config = DecoderConfig(
        vocab_size=23, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=64,
        **SHAPES[kind],
    )  # fmt: skip
    model = Decoder(config)
    init_weights(model, 0)
    return model


@pytest.mark.parametrize("kind", SHAPES)
def test_forward_and_backward_of_a_decoder_are_the_same(kind: str, cuda: SecondDevice) -> None:
    near = small_model(kind)
    far = copy.deepcopy(near).to("cuda")
    found = []
    for model, device in ((far, "cuda"), (near, "cpu")):
        torch.manual_seed(0)
        layout = PackedLayout.of_groups([(3, [4, 5]), (2, [7])], device)
        ids = torch.randint(0, 23, (21,)).to(device)
        logits = model.logits(model(ids, layout))
        logits.logsumexp(-1).sum().backward()
        found.append((logits, {n: p.grad for n, p in model.named_parameters()}))
    (far_logits, far_grads), (near_logits, near_grads) = found
    assert isinstance(far_logits, Far)
    torch.testing.assert_close(far_logits.cpu(), near_logits)
    for name, grad in near_grads.items():
        assert isinstance(far_grads[name], Far)
        torch.testing.assert_close(far_grads[name].cpu(), grad)


BF16 = "learner.dtype=bfloat16"
STEPS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full, bfloat16, recomputed": (BF16, "learner.recompute=true"),
    "qarl int8": ("learner.precision=qarl", "rollout.format=int8"),
    "qarl int8, bfloat16": ("learner.precision=qarl", "rollout.format=int8", BF16),
    "qarl fp8": ("learner.precision=qarl", "rollout.format=fp8", BF16, "learner.recompute=true"),
    "qarl int4": ("learner.precision=qarl", "rollout.format=int4", "rollout.unquantized=bf16"),
    "jet fp8": ("learner.precision=jet", "rollout.format=fp8"),
    "jet fp8, bfloat16": ("learner.precision=jet", "rollout.format=fp8", BF16),
    "critic": ("learner.advantage.type=gae", "learner.critic={}", "learner.reference_kl={}"),
    "penalty in the reward": ('learner.reference_kl={place="reward"}', "learner.epochs=2"),
    "LoRA on nf4": ("learner.lora={rank=4}", "rollout.format=nf4", "learner.reference_kl={}"),
    "LoRA on int4": ("learner.lora={rank=4}", "rollout.format=int4", BF16),
    "AdamW in 8 bits": ("learner.optimizer.type=adamw8bit", "learner.optimizer.small=1"),
    "Muon": ("learner.optimizer.type=muon",),
    "experts": ("model.experts=4", "learner.routing_replay=true", "learner.router_aux_coef=0.01"),
    "entropy": ("learner.entropy_coef=0.01", "learner.minibatches=2"),
}


def trainers(run: Run) -> tuple[Trainer, Trainer]:
    """On the second device, and on the CPU: the same weights."""
    found = []
    for device in ("cuda", "cpu"):
        cfg = msgspec.structs.replace(run.learner, device=device)
        placed = msgspec.structs.replace(run, learner=cfg)
        model = build_model(run, build_tokenizer(run)).to(device)
        set_precision(model, placed)
        found.append(Trainer(model, cfg, 1.0))
        found[-1].calibrate = run.rollout.kv_scales
    return found[0], found[1]


def close(far: Trainer, near: Trainer, atol: float) -> None:
    state = far.model.state_dict()
    for name, tensor in near.model.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), tensor, atol=atol, rtol=1e-3, msg=name)


@pytest.mark.parametrize("kind", STEPS)
def test_a_learner_step_is_the_same(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    # A large eps makes the optimizer's step smooth in the gradient.
    run = make_run("learner.optimizer.lr=0.01", "learner.optimizer.eps=1e-2", *STEPS[kind])
    far, near = trainers(run)
    far.tap = TokenTap()
    samples = make_samples(9)
    values = [trainer.step(samples) for trainer in (far, near)]
    if BF16 in STEPS[kind]:  # rounded elsewhere: CUDA's autocast has other lists of operations
        for name in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert values[0][name] == pytest.approx(values[1][name], rel=0.02, abs=0.01), name
        close(far, near, 5e-3)
    else:
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-4)
        close(far, near, 1e-5)
    assert len(far.tap.scores().logprobs) == sum(s.trajectory.num_tokens for s in samples)


@pytest.mark.parametrize(
    "kind", ["full", "full, bfloat16, recomputed", "AdamW in 8 bits", "critic"]
)
def test_a_learner_step_waits_as_often_with_more_layers(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    waits = []
    for layers in (1, 3):
        far, _ = trainers(make_run(*STEPS[kind], f"model.layers={layers}"))
        far.step(make_samples(9))
        cuda.waits.clear()
        far.step(make_samples(9))
        waits.append(cuda.waits.copy())
    assert waits[0] == waits[1]


def test_the_vocabulary_in_blocks_is_not_waited_for(cuda: SecondDevice) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(9, 8), torch.randn(1000, 8), torch.randint(0, 1000, (9,))
    found = []
    for device in ("cuda", "cpu"):
        h, w = (x.to(device).requires_grad_() for x in (hidden, weight))
        cuda.waits.clear()
        logprobs, _ = blockwise(h, w, targets.to(device, non_blocking=True), 1.0, False, block=1)
        logprobs.sum().backward()
        found.append((logprobs, h.grad, w.grad))
        assert cuda.waits.total() == (device == "cuda")  # whether the entropy learns
    for far, near in zip(*found, strict=True):
        torch.testing.assert_close(far.cpu(), near)


@pytest.mark.parametrize("percentile", [100, 90])
def test_kv_scales_are_the_same(
    percentile: int, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    run = make_run(
        "rollout.engine.kv_cache=fp8", f"rollout.kv_scales={{percentile={percentile}, tokens=20}}"
    )
    far, near = trainers(run)
    for trainer in (far, near):
        trainer.step(make_samples(9))
    assert len(far.kv_scales) == 6
    for name, scale in near.kv_scales.items():
        assert isinstance(far.kv_scales[name], Far)
        torch.testing.assert_close(far.kv_scales[name].cpu(), scale)


def test_the_warm_start_is_the_same(cuda: SecondDevice) -> None:
    near = small_model()
    far = copy.deepcopy(near).to("cuda")
    rows = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9])]
    (loss, right), (far_loss, far_right) = supervised_loss(near, rows), supervised_loss(far, rows)
    assert far_right == right
    torch.testing.assert_close(far_loss.cpu(), loss)


@pytest.mark.parametrize("format", ["int8", "nf4", "fp8"])
def test_the_fidelity_meters_policy_is_the_same(
    format: str, make_samples: MakeSamples, cuda: SecondDevice
) -> None:
    version = published(small_model(), format)
    found = []
    for device in ("cuda", "cpu"):
        policy = engine_policy(small_model().config, version.tensors, format, device)
        cfg = LearnerConfig(device=device, microbatch_tokens=40)
        found.append(Scorer(cfg)(policy, make_samples(9), 1.0))
    for far, near in zip(*found, strict=True):
        np.testing.assert_allclose(far, near, atol=1e-5)


def test_a_model_is_saved_and_read_again(cuda: SecondDevice, tmp_path: Path) -> None:
    model = small_model().to("cuda")
    save_decoder(model, tmp_path / "hf")
    read = load_decoder(tmp_path / "hf").to("cuda")
    assert all(same_bits(t, model.state_dict()[n].cpu()) for n, t in read.state_dict().items())


def published(model: Decoder, format: str, version: int = 0) -> WeightVersion:
    return pack_weights(
        quantize_state(model.state_dict(), format), run="r", epoch="e", version=version, format=format,
        uaq_scale=1.0, model=model.config.to_hf(), published_s=0.0,
    )  # fmt: skip


def generated(config: TorchEngine, versions: list[WeightVersion], greedy: bool) -> list[Any]:
    """Of requests of two lengths; versions after the first are loaded in flight."""
    sampling = Sampling(max_tokens=12, temperature=0.0 if greedy else 1.0)

    def ask(seed: int, **settings: Any) -> Request:
        prompt = np.arange(1, 4 + seed, dtype=np.int32)
        return Request(
            prompt_ids=prompt, num_samples=2, seed=seed, stop_ids=frozenset({22}),
            sampling=msgspec.structs.replace(sampling, **settings),
        )  # fmt: skip

    async def main() -> list[Any]:
        engine = build_engine(config)
        await engine.start()
        await engine.load_weights(versions[0])
        asked = [ask(0), ask(3), ask(1, max_tokens=5), ask(2, top_k=5, top_p=0.9, min_p=0.01)]
        try:
            tasks = [asyncio.ensure_future(engine.generate(request)) for request in asked]
            for version in versions[1:]:
                while engine.tokens_drawn < 24:  # type: ignore[attr-defined]
                    await asyncio.sleep(0)
                await engine.load_weights(version)
            return [completion for group in await asyncio.gather(*tasks) for completion in group]
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_the_engine_draws_the_same_tokens(format: str, kv: str, cuda: SecondDevice) -> None:
    kind = {"int8": "moe", "bf16": "qwen2"}.get(format, "qwen3")
    weights = [published(small_model(kind), format)]
    found = []
    for device in ("cuda", "cpu"):
        config = TorchEngine(slots=16, device=device, kv_cache=kv, fused=False)  # type: ignore[arg-type]
        found.append(generated(config, weights, greedy=False))
    for far, near in zip(*found, strict=True):
        assert far.response_ids.tolist() == near.response_ids.tolist()
        np.testing.assert_allclose(far.logprobs, near.logprobs, atol=1e-4)
        if kind == "moe":
            np.testing.assert_array_equal(far.routes, near.routes)


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_weights_are_swapped_in_flight(kv_on_update: str, cuda: SecondDevice) -> None:
    other = small_model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.sin(torch.arange(p.numel())).view(p.shape))
    weights = [published(small_model(), "fp8"), published(other, "fp8", version=1)]
    config = TorchEngine(slots=16, device="cuda", kv_cache="fp8", kv_on_update=kv_on_update)  # type: ignore[arg-type]
    found = generated(config, weights, greedy=True)
    assert {span.version for completion in found for span in completion.spans} == {0, 1}


def test_a_decoding_step_waits_for_the_device_once(cuda: SecondDevice) -> None:
    config = TorchEngine(slots=4, device="cuda")
    waits = []
    for tokens in (8, 18):
        cuda.waits.clear()
        request = Request(
            prompt_ids=np.arange(1, 5, dtype=np.int32), num_samples=4, seed=0, stop_ids=frozenset(),
            sampling=Sampling(max_tokens=tokens),
        )  # fmt: skip
        weights = published(small_model(), "int8")
        generate(config, weights, request)
        waits.append(cuda.waits.copy())
    steps = waits[1] - waits[0]
    assert steps.total() == 10, steps


def generate(config: TorchEngine, weights: WeightVersion, request: Request) -> None:
    async def main() -> None:
        engine = build_engine(config)
        await engine.start()
        await engine.load_weights(weights)
        await engine.generate(request)
        await engine.close()

    asyncio.run(main())


PUBLISHED: dict[str, tuple[str, ...]] = {
    **{name: (f"rollout.format={name}",) for name in FORMATS},
    "sticky, noisy": (
        "rollout.format=int8",
        "rollout.sticky_scales=0.1",
        "rollout.aqn={}",
        "learner.uaq=2",
    ),
    "in bf16": ("rollout.format=fp8", "rollout.unquantized=bf16", "learner.precision=qarl"),
    "LoRA": ("learner.lora={rank=4}", "rollout.format=nf4"),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_what_is_published_has_the_same_bytes(
    kind: str, make_run: MakeRun, cuda: SecondDevice
) -> None:
    run = make_run(*PUBLISHED[kind])
    digests = []
    for trainer in trainers(run):
        outlet, made = Outlet(Publisher(run), lambda made: None), []
        for version in range(3):
            outlet.begin(trainer.model, version, {})
            outlet.release()
            version = outlet.finish()
            assert version is not None
            made.append(version.manifest.digest)
        outlet.close()
        digests.append(made)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "kind", ["full", "critic", "LoRA on nf4", "qarl int8", "AdamW in 8 bits", "Muon"]
)
def test_a_checkpoint_goes_from_either_device_to_the_other(
    kind: str, make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice, tmp_path: Path
) -> None:
    run = make_run("learner.optimizer.lr=0.01", "learner.optimizer.eps=1e-2", *STEPS[kind])
    for number, (source, target) in enumerate([trainers(run), trainers(run)[::-1]]):
        source.step(make_samples(9))
        save_at(1, tmp_path / str(number), source)
        checkpoint.restore(tmp_path / str(number), target)
        for trainer in (source, target):
            trainer.step(make_samples(9, 1))
        close(*((source, target) if number == 0 else (target, source)), 1e-5)


@pytest.mark.parametrize("more", [(), ("learner.lora={rank=4}", "rollout.format=nf4")])
def test_a_trainer_is_built_resumed_and_exported_there(
    more: tuple[str, ...], make_run: MakeRun, make_samples: MakeSamples, cuda: SecondDevice,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = ("learner.device=cuda", "warmstart.steps=2", "learner.uaq=2", "learner.reference_kl={}")
    run = make_run(*place, *more)
    task, tokenizer = build_task(run.task), build_tokenizer(run)

    def build(resume: bool) -> Trainer:
        with MetricsLog(tmp_path, tensorboard=False) as metrics:
            stop = threading.Event()
            return build_trainer(run, tmp_path, resume, task, tokenizer, metrics, stop)[0]

    first, cached = build(False), build(False)  # the latter's warm start is read from its file
    first.step(make_samples(9))
    save_at(1, tmp_path / "checkpoints", first)
    resumed = build(True)
    for name, tensor in first.model.state_dict().items():
        if name.endswith("weight") or "lora" in name:
            assert torch.equal(resumed.model.state_dict()[name].cpu(), tensor.cpu()), name
    assert isinstance(next(cached.model.parameters()), Far)
    if run.learner.lora:
        save_adapted(first.model, tmp_path, run.learner.lora, run.learner.uaq, tokenizer)
        assert load_decoder(tmp_path / "hf").config.layers == 2


def test_a_run_logged_on_a_cpu_is_replayed_and_examined_on_the_device(
    make_run: MakeRun, make_group: Callable[..., Group], make_ticket: Callable[..., Ticket],
    cuda: SecondDevice, tmp_path: Path,
) -> None:  # fmt: skip
    run, directory = make_run("rollout.format=int8", "learner.fidelity.share=1"), tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(dump_toml(run))
    trainer, lineage, publisher = trainers(run)[1], Lineage(4), Publisher(run)
    versions = [publisher.make(trainer.model, 0)]
    lineage.published(0, versions[0].manifest.digest)
    state = checkpoint.State(
        step=0, position="0-0", cursor=0, outstanding=[], digests=dict(lineage.digests), updates=0,
        skipped=0, model=trainer.model.config.to_hf(),
    )  # fmt: skip
    checkpoint.save(directory / "checkpoints", state, trainer, keep=1)
    log, steps = TrajectoryLog(directory / "trajectories"), StepLog(directory / "steps")
    groups: list[Group] = []
    for step in range(2):
        groups = [make_group(make_ticket(4 * step + i, step=step)) for i in range(4)]
        groups = [within(group, lineage.digests[step], step) for group in groups]
        metrics = learn(trainer, groups, lineage, step)
        base = lineage.digests[step]
        versions.append(publisher.make(trainer.model, step + 1))
        lineage.published(step + 1, versions[-1].manifest.digest)
        log.append(step, step, groups)
        steps.append(
            StepRecord(
                step=step, tickets=[g.ticket.number for g in groups], seeds=[0] * 4, base_digest=base,
                digest=lineage.digests[step + 1], fork=0, settings="", machine="a CPU", metrics=metrics,
            )
        )  # fmt: skip
    log.close()
    steps.close()
    replay = Replay(directory, ["learner.device=cuda"])
    probe = Probe(replay.run, 0)
    replayed = list(replay.steps(probe))
    assert not replay.exact and not [d for one in replayed for d in compare(one, replay.exact)]
    assert isinstance(next(replay.trainer.model.parameters()), Far)
    assert np.isfinite(probe.table().terms).all()
    gaps = []
    for chosen in (replay.run, run):
        meter = FidelityMeter(chosen)
        meter.published(versions[1])
        gaps.append(meter.measure(groups))
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-4)


def within(group: Group, digest: str, version: int) -> Group:
    """`group` with tokens of the small vocabulary, all drawn by one version."""
    trajectories = [
        msgspec.structs.replace(
            t,
            response_ids=Array.of(t.response_ids.numpy() % 23, "int32"),
            spans=[VersionSpan(version, t.num_tokens, digest)],
        )
        for t in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=trajectories)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "vllm"])
def test_a_section_of_the_bench_ends_as_on_a_cpu(section: str, cuda: SecondDevice) -> None:
    torch.manual_seed(0)
    rows = list(SECTIONS[section](torch.device("cuda"), True))
    assert {row.name for row in rows if row.values}
    assert all(row.values or row.note for row in rows)
    if section == "bits":
        assert all(row.values["codes"] == row.values["scales"] == 1 for row in rows), rows
    if section == "generation":
        assert not [row for row in rows if row.note], rows
