"""Packed linear layers on a CPU against those of torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import njit

from areal_q.kernels import cpu_gemm, cpu_tile
from areal_q.kernels.cpu_tile import has_int8
from areal_q.linear import cpu_linear
from areal_q.linear.bf16_weight import Bf16Weight, bf16_weight
from areal_q.linear.cpu_linear import (
    Bf16Table,
    Float32Linear,
    FusedInt8Linear,
    PackedInt8Linear,
    bf16_linear,
)
from areal_q.linear.quantized_linear import FloatLinear, Int8Linear
from areal_q.linear.registry import linear_of
from areal_q.quant import FORMATS
from areal_q.quant.format import Format, Parts

SHAPES = [(1, 1, 1), (5, 33, 48), (16, 896, 200), (97, 2100, 65), (300, 64, 64)]


def int8_layer(channels: int, outs: int) -> Int8Linear:
    codes = torch.randint(-127, 128, (outs, channels), dtype=torch.int8)
    return Int8Linear(codes, torch.rand(outs, 1) / 127)


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize(("rows", "channels", "outs"), SHAPES)
def test_packed_int8_has_the_bits_of_torch(rows, channels, outs, added):
    torch.manual_seed(rows)
    plain, x = int8_layer(channels, outs), 3 * torch.randn(rows, channels)
    add = {"nothing": None, "bias": torch.randn(outs), "residual": torch.randn(rows, outs)}[added]
    assert torch.equal(cpu_linear.cpu_linear(plain)(x, add), FusedInt8Linear(plain)(x, add))


def test_packed_int8_adds_up_the_largest_codes():
    codes = torch.full((64, 8192), 127, dtype=torch.int8)
    codes[::2] = -127
    plain, x = Int8Linear(codes, torch.ones(64)), torch.full((2, 8192), 127.0)
    x[1] = -127
    want = x.double() @ codes.double().t()
    assert torch.equal(cpu_linear.cpu_linear(plain)(x).double(), want)


def test_threads_compute_the_same_bits():
    plain, x = int8_layer(640, 1000), torch.randn(64, 640)
    threads, layer = torch.get_num_threads(), cpu_linear.cpu_linear(plain)
    one = layer(x)
    torch.set_num_threads(3)
    try:
        assert torch.equal(layer(x), one)
    finally:
        torch.set_num_threads(threads)


def test_without_the_instruction_torch_multiplies(monkeypatch):
    plain = int8_layer(8, 8)
    assert isinstance(cpu_linear.cpu_linear(plain), PackedInt8Linear) == has_int8()
    monkeypatch.setattr(cpu_linear, "has_int8", lambda: False)
    monkeypatch.setattr(cpu_linear, "has_int_mm", lambda device: True)
    assert cpu_linear.cpu_linear(plain) is plain
    monkeypatch.setattr(cpu_linear, "has_int_mm", lambda device: False)
    assert isinstance(cpu_linear.cpu_linear(plain), FusedInt8Linear)
    floats = FloatLinear(torch.randn(8, 8))
    assert isinstance(cpu_linear.cpu_linear(floats), Float32Linear) == cpu_tile.has("avx512f")
    monkeypatch.setattr(cpu_linear, "has", lambda feature: False)
    assert cpu_linear.cpu_linear(floats) is floats


@pytest.mark.parametrize(
    ("asked", "function"), [("has_bf16", "_BF16_DOT"), ("has_int8", "INT8_DOT")]
)
def test_an_instruction_that_llvm_lacks_is_not_taken(asked, function, monkeypatch):
    monkeypatch.setattr(cpu_tile, "has", lambda feature: True)
    assert getattr(cpu_tile, asked)()
    monkeypatch.setattr(cpu_tile, function, "llvm.x86.avx512.missing.512")
    assert not getattr(cpu_tile, asked)()


def weights_of(name: str, channels: int, outs: int) -> tuple[Format, list[Parts]]:
    """Returns a format and two weights of it, of `outs` and 64 outputs."""
    torch.manual_seed(channels)
    format = FORMATS[name]
    return format, [format.quantize(0.02 * torch.randn(n, channels), "w") for n in (outs, 64)]


BF16_FORMATS = [name for name in FORMATS if name != "int8"]


@pytest.mark.parametrize("name", BF16_FORMATS)
def test_numbers_times_scales_are_the_published_weights(name):
    format, parts = weights_of(name, 330, 96)
    weight = bf16_weight(format, parts)
    spread = weight.scale.t().repeat_interleave(128 if len(weight.scale) > 1 else 330, 1)
    found = weight.numbers.float() * spread[:, :330]
    exact = torch.cat([format.dequantize(p) for p in parts])
    torch.testing.assert_close(found, exact, rtol=2**-22, atol=0)


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("name", BF16_FORMATS)
def test_bf16_products_are_those_of_float32(name, added):
    """Of activations that bfloat16 holds; two parts hold nearly all that float32 does."""
    format, parts = weights_of(name, 330, 96)
    plain, weight = linear_of(format, parts), bf16_weight(format, parts)
    x = torch.randn(97, 330)
    add = {"nothing": None, "bias": torch.randn(160), "residual": torch.randn(97, 160)}[added]
    torch.testing.assert_close(bf16_linear(weight, 2)(x, add), plain(x, add), rtol=0, atol=2e-5)
    rounded = x if weight.activations != "bfloat16" else x.bfloat16().float()
    # A single part rounds weights that are no bfloat16 numbers.
    rough = 0.02 if name in ("nf4", "int4-g32") else 2e-5
    torch.testing.assert_close(
        bf16_linear(weight, 1)(x, add), plain(rounded, add), rtol=0, atol=rough
    )


@pytest.mark.parametrize(("rows", "channels", "outs"), SHAPES)
def test_bf16_sums_are_float32_at_any_shape(rows, channels, outs):
    torch.manual_seed(rows)
    weight = Bf16Weight(torch.randn(outs, channels).bfloat16(), torch.ones(1, outs))
    x = torch.randn(rows, channels).bfloat16().float()
    found = bf16_linear(weight)(x).double()
    exact = x.double() @ weight.numbers.double().t()
    # Sums rounded to bfloat16 would be off by 2⁻⁹ of themselves.
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6 * channels)


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize(("rows", "channels", "outs"), SHAPES)
def test_float32_products_at_any_shape(rows, channels, outs, added):
    torch.manual_seed(rows)
    weight, x = torch.randn(outs, channels), torch.randn(rows, channels)
    add = {"nothing": None, "bias": torch.randn(outs), "residual": torch.randn(rows, outs)}[added]
    layers = [
        cpu_linear.cpu_linear(FloatLinear(weight)),
        bf16_linear(Bf16Weight(weight, torch.ones(1, outs)), 2),
    ]
    exact = x.double() @ weight.double().t() + (0 if add is None else add.double())
    for layer in layers:
        # Sums are float32; a product of bfloat16 parts would be off by 2⁻¹⁷ of itself.
        torch.testing.assert_close(
            layer(x, add).double(), exact, rtol=0, atol=2e-7 * max(channels, 16)
        )


def test_rows_have_the_same_bits_in_any_company():
    weight, x = torch.randn(70, 330), torch.randn(97, 330)
    layer = bf16_linear(Bf16Weight(weight, torch.ones(1, 70)), 2)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), layer(x))


def test_a_table_embeds_and_multiplies_the_same_numbers():
    weight = torch.randn(150, 33).bfloat16()
    table = Bf16Table(weight, 2)
    tokens = torch.tensor([0, 149, 64, 63, 64])
    assert torch.equal(table.embed(tokens), weight[tokens].float())
    x = torch.randn(5, 33)
    torch.testing.assert_close(table(x), x @ weight.float().t(), rtol=0, atol=1e-4)


def test_what_is_not_finite_stays_in_its_row_in_bf16():
    numbers, x = torch.randn(70, 33), torch.randn(3, 33)
    x[1, 4] = torch.nan
    for weight in (numbers, numbers.bfloat16()):
        for parts in (1, 2):
            layer = bf16_linear(Bf16Weight(weight, torch.ones(1, 70)), parts)
            assert layer(x).isfinite().all(1).tolist() == [True, False, True]


def test_a_processor_without_bf16_computes_the_same():
    """It takes shifts to float32 in place of the instruction."""
    tile = cpu_tile.tile(3, lambda operands, sums: cpu_tile.bf16_by_shifts)

    @njit
    def multiply(x, w, out):
        tile(
            x, x.ctypes.data, x.strides[0], w.ctypes.data, x.shape[1],
            out, 0, w.ctypes.data, 0,
        )  # fmt: skip

    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(64, 40).bfloat16()
    out = np.zeros((3, 64), np.float32)
    multiply(x.view(torch.int32).numpy(), cpu_gemm.pack_words(weight).numpy(), out)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(torch.from_numpy(out).double(), exact, rtol=0, atol=1e-4)


@given(hnp.arrays(np.float32, (3, 5), elements=st.floats(width=32)))
def test_parts_of_activations_round_as_torch_does(x):
    """Two parts are x rounded, and what is left of it rounded; NaN and infinity included."""
    first = torch.from_numpy(x).bfloat16()
    rest = (torch.from_numpy(x) - first.float()).bfloat16()
    found = torch.from_numpy(cpu_gemm.bf16_parts(x, 2)).view(torch.bfloat16)[..., :5]
    np.testing.assert_array_equal(found.float().numpy(), torch.stack((first, rest)).float().numpy())
