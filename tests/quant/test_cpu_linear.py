"""Packed linear layers on a CPU against those of torch."""

import pytest
import torch

from areal_q.quant import cpu_linear
from areal_q.quant.cpu_linear import FusedInt8Linear, PackedInt8Linear
from areal_q.quant.kernels.cpu_tile import has_int8
from areal_q.quant.quantized_linear import Int8Linear

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
    assert isinstance(cpu_linear.cpu_linear(plain), FusedInt8Linear)
