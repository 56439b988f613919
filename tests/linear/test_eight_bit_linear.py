"""Products that read codes of eight bits, against dense products in float64."""

import pytest
import torch

from areal_q.linear.eight_bit_linear import FEW, EightBitLinear, eight_bit_linear
from areal_q.linear.quantized_linear import FloatLinear
from areal_q.linear.registry import linear_of
from areal_q.quant import FORMATS

EIGHT = ["int8-weight", "fp8-weight"]


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, FEW, FEW + 1])
@pytest.mark.parametrize(("channels", "outs"), [(576, 192), (77, 5), (1, 64)])
@pytest.mark.parametrize("name", EIGHT)
def test_few_rows_are_multiplied_with_the_published_weights(name, channels, outs, rows, added):
    torch.manual_seed(rows)
    format = FORMATS[name]
    parts = [format.quantize(torch.randn(n, channels), "w") for n in (outs, 70)]
    x = torch.randn(rows, channels)
    add = {
        "nothing": None,
        "bias": torch.randn(outs + 70),
        "residual": torch.randn(rows, outs + 70),
    }[added]
    linear = eight_bit_linear(format, parts, linear_of(format, parts))
    exact = x.double() @ torch.cat([format.dequantize(p) for p in parts]).double().t()
    exact = exact if add is None else exact + add
    torch.testing.assert_close(linear(x, add).double(), exact, rtol=0, atol=1e-5 * channels**0.5)


def test_every_e4m3_code_is_the_number_torch_makes_of_it():
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127].view(-1, 1)
    weight = codes.view(torch.float8_e4m3fn)
    linear = EightBitLinear(weight, torch.ones(len(codes), 1), FloatLinear(weight.float()))
    assert torch.equal(linear(torch.ones(1, 1)), weight.float().t())


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in EIGHT])
def test_other_formats_keep_their_layer(name):
    format = FORMATS[name]
    parts = [format.quantize(torch.randn(128, 128), "w")]
    many = linear_of(format, parts)
    assert eight_bit_linear(format, parts, many) is many
