"""The Triton kernels, run by Triton's interpreter on the CPU, give the bits of the CPU's kernels and of torch.

`make test-formats` runs this; without Triton, or without its interpreter, the file is skipped.
"""
# pyright: reportMissingImports=false

import os

import pytest
import torch
from helpers.kinds import E4M3

from areal_q.kernels.quantize import dispatch
from areal_q.quant import activations
from areal_q.quant.formats.nf4 import BORDERS

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-formats", allow_module_level=True)
pytest.importorskip(
    "triton", reason="Triton is not installed: make test-formats", exc_type=ImportError
)
from areal_q.kernels.quantize import gpu_triton

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize(
    ("shape", "block"), [((5, 70), (1, 70)), ((130, 140), (128, 128)), ((3, 256), (1, 256))]
)
@pytest.mark.parametrize("kind", ["normal", "wide", "zeros"])
def test_the_interpreted_kernel_gives_the_cpus_bits(dtype, shape, block, kind):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    if kind == "wide":
        weight = weight * torch.exp(8 * torch.randn(shape))
    elif kind == "zeros":
        weight[:, : shape[1] // 2] = 0
    want = dispatch.eight_bits(weight, "w", dtype, block)
    assert want is not None
    codes, scales, _ = gpu_triton.quantize(weight, dtype, block, None)
    assert torch.equal(scales, want[1])
    assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
    given = 0.5 * scales * (127 if dtype == torch.int8 else 448)
    want = dispatch.eight_bits(weight, "w", dtype, block, given)
    assert want is not None
    got = gpu_triton.quantize(weight, dtype, block, given)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


def test_what_is_not_finite_is_seen():
    weight = torch.ones(2, 8)
    weight[1, 3] = float("nan")
    assert gpu_triton.quantize(weight, torch.int8, (1, 8), None)[2] > 0x7F800000


def activations_on_a_gpu(x, dtype, width, *, least_range=0.0, least_scale):
    return gpu_triton.activations(x, dtype, width, least_range, least_scale)


@pytest.mark.parametrize(
    "quantize",
    [activations.quantize_rows, activations.quantize_rows_e4m3, activations.quantize_groups_e4m3],
)
@pytest.mark.parametrize("shape", [(1, 8), (37, 300), (70, 256)])
def test_activations_have_the_bits_of_torch(monkeypatch, quantize, shape):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp(8 * torch.randn(shape))
    x[0] = 0
    codes, scales = quantize(x)
    monkeypatch.setattr(dispatch, "activations", activations_on_a_gpu)
    fast, fast_scales = quantize(x)
    assert torch.equal(fast.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(fast_scales, scales) and fast_scales.dtype == torch.float32


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_activations_that_are_not_finite_stay_so(monkeypatch, value):
    x = torch.ones(3, 256)
    x[1, 7] = value
    monkeypatch.setattr(dispatch, "activations", activations_on_a_gpu)
    seen = activations.dequantize_groups(*activations.quantize_groups_e4m3(x))
    assert seen[1, :128].isnan().any()
    assert seen[0].isfinite().all() and seen[1, 128:].isfinite().all() and seen[2].isfinite().all()


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("shape", [(1, 1), (5, 70), (67, 256)])
def test_ranges_are_the_cpus(shape, width):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    want = dispatch.row_blocks(weight, width)
    assert want is not None and torch.equal(gpu_triton.ranges(weight, width), want)
    weight[-1, -1] = float("nan")
    assert gpu_triton.ranges(weight, width)[-1, -1].isnan()


@pytest.mark.parametrize(
    ("kind", "width", "shape"),
    [
        ("int4", 128, (5, 70)), ("int4", 128, (67, 384)), ("e2m1", 16, (5, 70)), ("e2m1", 32, (67, 256)),
        ("nf4", 64, (100, 64)),
    ],
)  # fmt: skip
def test_four_bits_are_the_cpus(kind, width, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    ranges = dispatch.row_blocks(weight, width)
    assert ranges is not None
    weight[0, :4] = torch.tensor([0.25, -0.25, 0.75, 2.5]) * ranges[0, 0]  # ties
    scales = ranges / {"int4": 7.5, "e2m1": 4.0, "nf4": 1.0}[kind]
    scales[-1, -1] = torch.inf
    row_bytes = 4 * -(-shape[1] // 8) if kind == "int4" else shape[1] // 2
    borders = BORDERS if kind == "nf4" else torch.empty(0)
    want = dispatch.four_bits(weight, scales, width, row_bytes, kind=kind, borders=borders)
    got = gpu_triton.nibbles(weight, scales, width, row_bytes, kind, borders)
    assert want is not None and torch.equal(got, want)
