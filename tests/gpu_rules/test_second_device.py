"""What runs on a GPU, on a device that is none but keeps its rules (second_device.py): the CPU's results, and
no tensors of two devices in one operation."""

import asyncio
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import ask, generate, serving
from helpers.kinds import error_bound
from helpers.policies import pack_state
from helpers.strategies import grouped
from torch._subclasses.fake_tensor import FakeTensorMode

from areal_q.config import TorchEngine
from areal_q.linear.quantized_linear import int8_matmul
from areal_q.linear.registry import linear_of
from areal_q.messages import Noise
from areal_q.models import (
    Decoder,
    DecoderConfig,
    Experts,
    init_weights,
    load_decoder,
    save_decoder,
)
from areal_q.models.logprobs import blockwise
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.aqn import with_noise
from areal_q.quant.rescaling import apply_uaq
from areal_q.quant.sticky_scales import StickyRanges
from areal_q.weights.version import WeightVersion
from bench.gpu.sections import SECTIONS
from rollout.engines import build_engine
from rollout.engines.base import Request

if not shutil.which("c++"):
    pytest.skip("no C++ compiler for the second device's guard", allow_module_level=True)
from helpers.second_device import Far, SecondDevice, same_bits


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
    assert all(place.startswith("tests/gpu_rules/test_second_device.py:") for place in cuda.waits)


READ_BY_THE_HOST = ("weight_shape", "weight.quant_state.bitsandbytes__nf4")


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
    assert same_bits(error_bound(name, far), error_bound(name, near))
    want, got = linear_of(format, [near, near]), linear_of(format, [far, far])
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
        layout = grouped([(3, [4, 5]), (2, [7])], device)
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


def test_a_model_is_saved_and_read_again(cuda: SecondDevice, tmp_path: Path) -> None:
    model = small_model().to("cuda")
    save_decoder(model, tmp_path / "hf")
    read = load_decoder(tmp_path / "hf").to("cuda")
    assert all(same_bits(t, model.state_dict()[n].cpu()) for n, t in read.state_dict().items())


def published(model: Decoder, format: str, version: int = 0) -> WeightVersion:
    return pack_state(model.state_dict(), model.config.to_hf(), format, version)


def generated(config: TorchEngine, versions: list[WeightVersion], greedy: bool) -> list[Any]:
    """Of requests of two lengths; versions after the first are loaded in flight."""
    sampling = {"max_tokens": 12, "temperature": 0.0 if greedy else 1.0}

    def of(seed: int, **changes: Any) -> Request:
        return ask(range(1, 4 + seed), 2, seed, [22], **sampling | changes)

    async def main() -> list[Any]:
        asked = [of(0), of(3), of(1, max_tokens=5), of(2, top_k=5, top_p=0.9, min_p=0.01)]
        async with serving(build_engine(config), versions[0]) as engine:
            tasks = [asyncio.ensure_future(engine.generate(request)) for request in asked]
            for version in versions[1:]:
                while engine.tokens_drawn < 24:
                    await asyncio.sleep(0)
                await engine.load_weights(version)
            return [completion for group in await asyncio.gather(*tasks) for completion in group]

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
        # Another order of sums may move a key of an FP8 cache to the next code.
        atol = 1e-3 if kv == "fp8" else 1e-4
        np.testing.assert_allclose(far.logprobs, near.logprobs, atol=atol)
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
        request = ask(range(1, 5), 4, max_tokens=tokens)
        generate(published(small_model(), "int8"), request, config=config)
        waits.append(cuda.waits.copy())
    steps = waits[1] - waits[0]
    assert steps.total() == 10, steps


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in ("runs", "vllm")])
def test_a_section_of_the_bench_ends_as_on_a_cpu(section: str, cuda: SecondDevice) -> None:
    torch.manual_seed(0)
    rows = list(SECTIONS[section](torch.device("cuda"), True))
    assert {row.name for row in rows if row.values}
    assert all(row.values or row.note for row in rows)
    if section == "bits":
        assert all(row.values["codes"] == row.values["scales"] == 1 for row in rows), rows
    if section == "generation":
        assert not [row for row in rows if row.note], rows
