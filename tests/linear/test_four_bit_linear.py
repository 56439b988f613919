"""Products of four-bit codes and int8 activations against the weights that the formats say they are."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from areal_q.kernels import cpu_four_bits
from areal_q.kernels.cpu_tile import has
from areal_q.linear.four_bit_linear import (
    FourBitLinear,
    Int8RowsLinear,
    four_bit_linear,
    four_bit_weight,
)
from areal_q.quant import FORMATS
from areal_q.quant.activations import quantize_rows
from areal_q.quant.format import Format, Parts

TAKEN = ["int4", "int4-g32", "nvfp4", "mxfp4"]
SHAPES = [(1, 2, 1), (5, 34, 48), (16, 896, 200), (97, 330, 65), (200, 256, 64)]


def weights_of(name: str, channels: int, *outs: int) -> tuple[Format, list[Parts]]:
    """Returns a format and a weight of it for each of `outs`."""
    torch.manual_seed(channels)
    format = FORMATS[name]
    return format, [format.quantize(0.02 * torch.randn(n, channels), "w") for n in outs]


def exact(format: Format, parts: list[Parts], x: Tensor) -> Tensor:
    """Returns in float64 what a layer computes whose activations are rounded as INT8's."""
    codes, scale = quantize_rows(x)
    weight = torch.cat([format.dequantize(p) for p in parts])
    return (codes.double() * scale.double()) @ weight.double().t()


@pytest.mark.parametrize("name", TAKEN)
def test_numbers_times_scales_are_the_published_weights(name):
    format, parts = weights_of(name, 330, 96, 64)
    weight = four_bit_weight(format, parts)
    assert weight is not None
    codes = torch.stack([weight.words >> 4 * i & 15 for i in range(8)], -1).flatten(1)[:, :330]
    scale = weight.scale.repeat_interleave(weight.block, 1)[:, :330]
    found = weight.numbers[codes.int()].float() * scale
    published = torch.cat([format.dequantize(p) for p in parts])
    torch.testing.assert_close(found, published, rtol=2**-22, atol=0)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize(("rows", "channels", "outs"), SHAPES)
@pytest.mark.parametrize("name", TAKEN)
def test_products_are_exact_but_for_the_sums_of_blocks(
    name, rows, channels, outs, added, kernel, monkeypatch
):
    """With the processor's instructions, where it has them, and without."""
    kernel &= cpu_four_bits.has_four_bits()
    monkeypatch.setattr(cpu_four_bits, "has_four_bits", lambda: kernel)
    format, parts = weights_of(name, channels, outs, 3)
    layer, x = four_bit_linear(format, parts), torch.randn(rows, channels)
    assert isinstance(layer, FourBitLinear if kernel else Int8RowsLinear)
    add = {"nothing": None, "bias": torch.randn(outs + 3), "residual": torch.randn(rows, outs + 3)}
    want = exact(format, parts, x) + (0 if add[added] is None else add[added].double())
    torch.testing.assert_close(layer(x, add[added]).double(), want, rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", TAKEN)
def test_the_largest_codes_add_up(name):
    """The table's numbers are unsigned: at their largest, products are those of 15 or 24 and ±127."""
    format, parts = weights_of(name, 8192, 64)
    weight = torch.full((64, 8192), 6.0)
    weight[::2] = -6.0
    parts, x = [format.quantize(weight, "w")], torch.full((2, 8192), 127.0)
    x[1] = -127.0
    layer = four_bit_linear(format, parts)
    assert layer is not None
    # The kernel adds up to 256 groups' sums in float32, and without it 8,192 products are added up so.
    sums = 1e-5 if cpu_four_bits.has_four_bits() else 1e-4
    torch.testing.assert_close(layer(x).double(), exact(format, parts, x), rtol=sums, atol=0)


@pytest.mark.skipif(not cpu_four_bits.has_four_bits(), reason="this processor lacks the kernel")
def test_rows_have_the_same_bits_in_any_company_and_thread():
    format, parts = weights_of("nvfp4", 640, 1000)
    layer, x = four_bit_linear(format, parts), torch.randn(97, 640)
    assert layer is not None
    together, threads = layer(x), torch.get_num_threads()
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), together)
    torch.set_num_threads(3)
    try:
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_stays_in_its_row():
    format, parts = weights_of("int4", 64, 70)
    layer, x = four_bit_linear(format, parts), torch.randn(3, 64)
    assert layer is not None
    x[1, 4] = torch.nan
    assert layer(x).isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in TAKEN])
def test_other_formats_keep_their_activations(name):
    assert four_bit_linear(*weights_of(name, 32, 8)) is None


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not has("avx512f"), reason="this processor has no AVX-512: the tests above")
def test_layers_agree_with_every_kernel_without_avx512():
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma"}
    compiled = "areal_q.kernels.quantize.eight_bits, rollout.engines.reference.ops_numba"
    command = [sys.executable, "-c", f"import {compiled}, pytest, sys\n"
               f"sys.exit(pytest.main(['-n0', {__file__!r}]))"]  # fmt: skip
    done = subprocess.run(command, env=os.environ | narrow, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
