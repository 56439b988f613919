"""The FP8 flow: each product against its definition in float64, and what of it is kept."""

import pytest
import torch
import torch._meta_registrations as torch_checks
from helpers.fixture_types import MakeRun
from helpers.policies import build_policy
from torch import Tensor, nn

from areal_q.linear import registry
from areal_q.linear.fp8_gemm import (
    Fp8KernelLinear,
    Operand,
    agrees,
    emulated,
    fp8_gemm,
    scaled_mm,
    scales_for_cublas,
)
from areal_q.linear.registry import linear_of
from areal_q.models.layers.linear import Linear
from areal_q.models.low_bit.fp8_training import Fp8TrainingLinear, operands
from areal_q.models.low_bit.published_state import published_state
from areal_q.models.low_bit.quantized_forward import linears, use
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.activations import quantize_groups_e4m3
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder

JET = ["learner.precision=jet", "rollout.format=fp8"]
SHAPES = [(7, 32, 48), (130, 160, 96), (256, 256, 128)]


def rounded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x, float64, by way of E4M3 with one scale for every block of rows × columns: a plain loop."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale = (block.abs().max().float().clamp(min=1e-10) / torch.tensor(448.0)).float()
            codes = (block.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[i : i + rows, j : j + columns] = codes.double() * scale.double()
    return out


def layer(tokens: int, inputs: int, outputs: int) -> tuple[Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    attention = nn.ModuleDict({"q_proj": Linear(inputs, outputs)})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": attention})])})
    use(Fp8TrainingLinear, model, "fp8")
    x = torch.randn(tokens, inputs).requires_grad_()
    return linears(model)["layers.0.self_attn.q_proj"], x, torch.randn(tokens, outputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_three_products_are_those_of_the_definition(shape: tuple[int, int, int]):
    linear, x, upstream = layer(*shape)
    y = linear(x)
    (y * upstream).sum().backward()
    xq, wq = (
        rounded(x.detach().double(), 1, 128),
        rounded(linear.weight.detach().double(), 128, 128),
    )
    bias = linear.bias.detach().double()
    torch.testing.assert_close(y.detach().double(), xq @ wq.t() + bias, atol=1e-4, rtol=1e-4)
    dgrad = rounded(upstream.double(), 1, 128) @ wq
    assert x.grad is not None and torch.equal(x.grad, x.grad.bfloat16().float())
    torch.testing.assert_close(x.grad.double(), dgrad, atol=1e-3, rtol=2**-8 * 1.1)
    wgrad = rounded(upstream.double(), 128, 1).t() @ rounded(xq, 128, 1)
    assert linear.weight.grad is not None
    torch.testing.assert_close(linear.weight.grad.double(), wgrad, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(linear.bias.grad, upstream.sum(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_near_those_of_full_precision(shape: tuple[int, int, int]):
    linear, x, upstream = layer(*shape)
    (linear(x) * upstream).sum().backward()
    assert x.grad is not None and linear.weight.grad is not None
    for got, exact in (
        (x.grad, upstream @ linear.weight.detach()),
        (linear.weight.grad, upstream.t() @ x.detach()),
    ):
        assert 0 < (got - exact).norm() < 0.08 * exact.norm()


def test_of_activations_only_fp8_codes_and_scales_are_kept():
    linear, x, _ = layer(64, 256, 128)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x)
    assert sorted(str(t.dtype) for t in kept) == ["torch.float32", "torch.float8_e4m3fn"]
    assert sum(t.nbytes for t in kept) == 64 * 256 + 64 * 2 * 4


def test_the_weights_of_the_flow_are_the_ones_published(make_run: MakeRun, make_samples):
    run = make_run(*JET, "learner.optimizer.lr=0.01")
    policy = build_policy(run)
    model = policy.model
    first = VersionBuilder(run).build(model, 0).manifest.digest
    update_policy(policy, make_samples(12))
    published = published_state(model, "fp8")
    for name, linear in linears(model).items():
        assert isinstance(linear, Fp8TrainingLinear)
        assert published[f"{name}.weight"] is linear.parts["weight"] is linear.rows.codes
    fresh = quantize_state(model.state_dict(), "fp8")
    assert all(
        torch.equal(fresh[k].contiguous().view(torch.uint8), v.contiguous().view(torch.uint8))
        for k, v in published.items()
    )
    assert VersionBuilder(run).build(model, 1).manifest.digest != first


def test_rows_of_an_operand_are_its_numbers_for_any_block_start():
    parts, index = FORMATS["fp8"].quantize(torch.randn(200, 300), "w"), torch.tensor([130, 5, 127])
    for operand in operands(parts):
        alone = operand.rows(index)
        assert torch.equal(alone.numbers(), operand.numbers()[index])
        assert torch.equal(alone.rows(torch.tensor([2])).numbers(), alone.numbers()[2:])


@pytest.mark.parametrize("outputs", [(128, 256, 64), (96, 40, 8)])
def test_where_there_is_a_kernel_the_format_runs_on_it(monkeypatch, outputs):
    torch.manual_seed(0)
    parts = [FORMATS["fp8"].quantize(torch.randn(rows, 200), "w") for rows in outputs]
    want = linear_of(FORMATS["fp8"], parts)
    monkeypatch.setattr(registry, "fp8_gemm", lambda device: lambda a, b: emulated(a, b))
    linear = linear_of(FORMATS["fp8"], parts)
    assert isinstance(linear, Fp8KernelLinear)
    x, bias, index = torch.randn(9, 200), torch.randn(sum(outputs)), torch.tensor([3, 0, 77])
    assert torch.equal(linear(x, bias), want(x, bias))
    torch.testing.assert_close(linear.rows(index)(x), want(x)[:, index])


def test_without_a_gpu_the_products_are_emulated():
    assert fp8_gemm(torch.device("cpu")) is emulated


def refuses(a, b):
    raise RuntimeError("only for compute capability 10.0")


def test_kernel_that_refuses_or_misreads_scales_is_passed_over(caplog):
    cpu = torch.device("cpu")
    assert agrees(lambda a, b: emulated(a, b).to(torch.bfloat16).float(), cpu)
    assert not caplog.records
    assert not agrees(refuses, cpu)
    assert "a kernel refuses: only for compute capability" in caplog.text
    swapped = lambda a, b: emulated(a, b._replace(scale=b.scale.flip(1)))  # noqa: E731
    assert not agrees(swapped, cpu)
    assert "a kernel disagrees" in caplog.text


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("shape", [(256, 256, 384), (7, 48, 32), (1, 130, 1000), (33, 896, 3584)])
def test_a_gpu_is_given_what_torchs_own_check_of_scaled_mm_wants(monkeypatch, shape, blocks):
    def checked(a, b, scale_a, recipe_a, scale_b, recipe_b, output_dtype):
        torch_checks._check_scaled_mm_sizes_v2(
            a, b, [scale_a], [recipe_a], [scale_b], [recipe_b], None, output_dtype, None, None
        )
        return torch.zeros(a.shape[0], b.shape[1])

    monkeypatch.setattr(torch_checks, "device_hint", lambda tensor: "cuda")
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", checked)
    rows, outputs, inputs = shape
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    right = Operand(*quantize_groups_e4m3(weight))
    if blocks:
        scale = torch.ones(-(-outputs // 128), -(-inputs // 128))
        right = Operand(right.codes, scale, blocks=True)
    assert scaled_mm(Operand(*quantize_groups_e4m3(x)), right).shape == (rows, outputs)


@pytest.mark.parametrize(("rows", "k"), [(256, 3), (160, 8), (16, 1)])
def test_scales_lie_in_memory_as_cublas_reads_them(rows, k):
    single = scales_for_cublas(torch.rand(rows - 3, k), rows, blocks=False)
    assert single.shape == (rows, k) and single.stride(0) == 1
    assert k == 1 or single.stride(1) == rows
    whole = torch.rand(-(-rows // 128), k)
    square = scales_for_cublas(whole, rows, blocks=True)
    longest = -(-k // 4) * 4
    assert square.shape == (longest, whole.shape[0]) and square.stride() == (1, longest)
    assert torch.equal(square.t()[:, :k], whole) and not square.t()[:, k:].any()
