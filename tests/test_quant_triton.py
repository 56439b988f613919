"""The Triton kernel, run by Triton's interpreter on the CPU, gives the bits of the CPU's kernel.

`make test-formats` runs this; without Triton, or without its interpreter, the file is skipped.
"""
# pyright: reportMissingImports=false

import os

import pytest
import torch

from areal_q.quant import once

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", exc_type=ImportError)
from areal_q.quant import triton_kernels

pytestmark = pytest.mark.filterwarnings("ignore")
E4M3 = torch.float8_e4m3fn


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
    want = once.eight_bits(weight, "w", dtype, block, fold=2 / 3)
    assert want is not None
    codes, scales, _, _ = triton_kernels.quantize(weight, 2 / 3, dtype, block, None, None)
    assert torch.equal(scales, want[1])
    assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
    given = 0.5 * scales * (127 if dtype == torch.int8 else 448)
    want = once.eight_bits(weight, "w", dtype, block, given, previous=codes)
    assert want is not None
    got = triton_kernels.quantize(weight, 1.0, dtype, block, given, codes)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1]) and got[2] == want[2]


def test_what_is_not_finite_is_seen():
    weight = torch.ones(2, 8)
    weight[1, 3] = float("nan")
    assert triton_kernels.quantize(weight, 1.0, torch.int8, (1, 8), None, None)[3] > 0x7F800000
