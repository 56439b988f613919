"""What every number format promises, whatever its layout; int8 and bf16 by hand and by torch's casts."""

import numpy as np
import pytest
import torch
from helpers.kinds import error_bound, every_format
from helpers.policies import pack_state
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal_q.errors import QuantizationError
from areal_q.linear.quantized_linear import (
    FloatLinear,
    Int8Linear,
    has_int_mm,
    int8_matmul,
)
from areal_q.linear.registry import linear_of
from areal_q.quant import FORMATS, dequantize_state, is_quantized, quantize_state
from areal_q.quant.activations import quantize_rows
from areal_q.weights import delta

INT8, BF16 = FORMATS["int8"], FORMATS["bf16"]
TINY = torch.finfo(torch.float32).tiny
SHAPES = [(1, 2), (3, 34), (128, 128), (130, 258), (5, 1024)]

float_weights = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 33), st.integers(1, 80).map(lambda n: 2 * n)),
    elements=st.floats(-(2.0**126), 2.0**126, width=32) | st.floats(-1, 1, width=32),
).map(torch.from_numpy)


def test_int8_of_a_row_by_hand():
    # absmax 2.54 → scale 0.02; in the second row the scale is 1 and halves round to even
    parts = INT8.quantize(torch.tensor([[2.54, -2.54, 0.5, 0.0], [127.0, 0.5, 1.5, -2.5]]), "w")
    assert parts["weight"].tolist() == [[127, -127, 25, 0], [127, 0, 2, -2]]
    assert parts["weight"].dtype == torch.int8
    torch.testing.assert_close(parts["weight_scale"], torch.tensor([[0.02], [1.0]]))


@settings(max_examples=40, deadline=None)
@given(weight=float_weights)
@every_format
def test_dequantized_weights_lie_within_the_stated_bound(name, weight):
    parts = FORMATS[name].quantize(weight, "w")
    real = FORMATS[name].dequantize(parts)
    assert real.shape == weight.shape and real.dtype == torch.float32
    gap = (real.double() - weight.double()).abs()
    bound = error_bound(name, parts).double().expand_as(gap)
    assert (gap <= bound).all(), (gap / bound).max()
    assert list(parts) == list(FORMATS[name].suffixes)


@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bound_is_tight_enough_to_mean_something(name, shape):
    weight = torch.randn(shape)
    parts = FORMATS[name].quantize(weight, "w")
    gap = (FORMATS[name].dequantize(parts) - weight).abs()
    assert (error_bound(name, parts).expand_as(gap) <= 0.5 * weight.abs().max()).all()


@given(float_weights)
def test_int8_error_is_at_most_half_a_scale(weight):
    parts = INT8.quantize(weight, "w")
    exact = parts["weight"].double() * parts["weight_scale"].double()
    slack = 0.5 * (1 + 2**-15)  # the division before rounding is float32: 127 · 2⁻²³ of a code
    assert ((exact - weight.double()).abs() <= slack * parts["weight_scale"].double()).all()
    assert parts["weight"].abs().max() <= 127


@given(float_weights)
def test_quantizing_a_dequantized_weight_gives_the_same_codes(weight):
    for name in ("int8", "bf16"):
        parts = FORMATS[name].quantize(weight, "w")
        again = FORMATS[name].quantize(FORMATS[name].dequantize(parts), "w")
        assert torch.equal(again["weight"], parts["weight"])


def test_bf16_is_torchs_own_cast():
    bits = torch.randint(-(2**31), 2**31, (64, 33)).to(torch.int32)
    bits[0] = bits[0] & ~0xFFFF | 0x8000  # half way between two numbers
    bits[1] &= 0x807FFFFF  # subnormal numbers
    weight = bits.view(torch.float32)
    weight[~(weight.abs() <= 2.0**127)] = 1.0
    assert torch.equal(BF16.quantize(weight, "w")["weight"], weight.bfloat16())


def test_rows_of_zeros_and_of_subnormals_keep_a_defined_scale():
    weight = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [TINY * 127, TINY], [1e-41, 3e-38]])
    parts = INT8.quantize(weight, "w")
    assert parts["weight"].tolist() == [[0, 0], [0, 0], [127, 1], [0, 3]]
    assert torch.equal(parts["weight_scale"], torch.full((4, 1), TINY))


@every_format
def test_zeros_stay_zeros_and_tiny_weights_stay_in_bounds(name):
    weight = torch.zeros(3, 256)
    assert torch.equal(FORMATS[name].dequantize(FORMATS[name].quantize(weight, "w")), weight)
    weight[0, 3], weight[1, 200], weight[2, 0] = 1e-45, -TINY, 3e-39
    parts = FORMATS[name].quantize(weight, "w")
    gap = (FORMATS[name].dequantize(parts).double() - weight.double()).abs()
    assert (gap <= error_bound(name, parts).double()).all()


@every_format
def test_an_outlier_costs_precision_in_its_own_block_only(name):
    weight = torch.randn(256, 256).clamp_(-3, 3)
    without = FORMATS[name].dequantize(FORMATS[name].quantize(weight, "w"))
    weight[200, 5] = 1e30 if not FORMATS[name].shared_scale else 100.0
    gap = (FORMATS[name].dequantize(FORMATS[name].quantize(weight, "w")) - weight).abs()
    assert gap[:128].max() < 0.6  # of every format, none has a block of more than 128 rows
    if name == "bf16":
        return
    assert (gap[200, :16] >= (without - weight)[200, :16].abs()).sum() > 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@every_format
def test_nan_and_infinity_are_refused_by_name(name, bad):
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(QuantizationError, match=r"layers\.0\.q"):
        FORMATS[name].quantize(weight, "layers.0.q")


@every_format
@pytest.mark.parametrize("weight", [torch.ones(4), torch.ones(2, 2, 2), torch.ones(2, 2).int()])
def test_what_is_no_float_matrix_is_refused_by_name(name, weight):
    with pytest.raises(QuantizationError, match=r"layers\.0\.q"):
        FORMATS[name].quantize(weight, "layers.0.q")


@every_format
def test_magnitudes_up_to_2_to_the_127_are_kept_larger_refused(name):
    weight = torch.tensor([[2.0**127, -(2.0**127), 1.0, 0.0]])
    assert FORMATS[name].dequantize(FORMATS[name].quantize(weight, "w")).isfinite().all()
    with pytest.raises(QuantizationError, match="huge"):
        FORMATS[name].quantize(weight * (1 + 2**-23), "huge")


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_float_dtypes_are_taken_as_float32(name, dtype):
    weight = torch.randn(6, 48).to(dtype)
    want = FORMATS[name].quantize(weight.float(), "w")
    for suffix, tensor in FORMATS[name].quantize(weight, "w").items():
        assert torch.equal(tensor.view(torch.uint8), want[suffix].view(torch.uint8))


@every_format
def test_what_lies_beyond_given_ranges_is_clamped(name):
    chosen = FORMATS[name]
    weight = torch.randn(16, 256)
    ranges = chosen.ranges(weight)
    if ranges is None:
        return
    beyond = chosen.dequantize(chosen.quantize(1000 * weight, "w", ranges)).abs()
    inside = chosen.dequantize(chosen.quantize(weight, "w", ranges)).abs()
    # A power of two as scale, rounded down, reaches up to 6/4 of the largest weight that asked for it.
    assert beyond.isfinite().all() and beyond.max() <= 1.5 * inside.max()


@every_format
def test_measured_ranges_are_used_when_none_are_given(name):
    weight = torch.randn(130, 300)
    given_them = FORMATS[name].quantize(weight, "w", FORMATS[name].ranges(weight))
    for suffix, tensor in FORMATS[name].quantize(weight, "w").items():
        assert torch.equal(tensor.view(torch.uint8), given_them[suffix].view(torch.uint8))


@every_format
def test_linear_multiplies_with_dequantized_weights_of_all_parts(name):
    chosen = FORMATS[name]
    parts = [chosen.quantize(torch.randn(rows, 200), "w") for rows in (40, 24)]
    x, bias, residual = torch.randn(9, 200), torch.randn(64), torch.randn(9, 64)
    linear = linear_of(chosen, parts)
    want = x @ torch.cat([chosen.dequantize(p) for p in parts]).t()
    # The activations of W8A8 formats are rounded to 7 or 4 significant bits.
    error = {"rtol": 0, "atol": 0.05 * float(want.abs().max())}
    torch.testing.assert_close(linear(x), want, **error)
    torch.testing.assert_close(linear(x, bias), want + bias, **error)
    torch.testing.assert_close(linear(x, residual), want + residual, **error)
    torch.testing.assert_close(linear(x, residual), linear(x) + residual, rtol=1e-5, atol=1e-5)


@every_format
def test_some_outputs_of_a_linear_are_the_same_among_all(name):
    chosen = FORMATS[name]
    linear = linear_of(chosen, [chosen.quantize(torch.randn(n, 160), "w") for n in (130, 40)])
    x, index = torch.randn(5, 160), torch.tensor([129, 3, 169, 0])
    torch.testing.assert_close(linear.rows(index)(x), linear(x)[:, index])


@every_format
def test_a_row_that_is_not_finite_spoils_itself_only(name):
    linear = linear_of(FORMATS[name], [FORMATS[name].quantize(torch.randn(8, 160), "w")])
    x = torch.randn(4, 160)
    x[1, 3], x[2, 130] = float("nan"), float("inf")
    y = linear(x)
    assert y[[0, 3]].isfinite().all() and not y[[1, 2]].isfinite().any()


@every_format
def test_a_delta_between_two_versions_is_exact(name):
    torch.manual_seed(0)
    state = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(70, 130),
        "model.norm.weight": torch.ones(130),
    }
    nudged = {key: w + 1e-3 * torch.randn_like(w) for key, w in state.items()}
    base, new = (pack_state(s, {}, name, i) for i, s in enumerate((state, nudged)))
    body = delta.diff(base, new)
    assert body is not None
    applied = delta.apply(base, body, torch.empty_like(base.payload))
    assert torch.equal(applied.payload, new.payload) and applied.manifest == new.manifest
    assert list(applied.tensors) == list(quantize_state(state, name))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 5, 7), (17, 1040, 9), (2, 1041, 3), (64, 128, 256)]
)
def test_the_integer_product_is_exact(shape):
    m, k, n = shape
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    a[0], b[0] = 127, -127
    assert torch.equal(int8_matmul(a, b.t()).long(), a.long() @ b.long().t())


def test_a_device_without_the_fast_kernel_does_not_take_it():
    assert not has_int_mm("mps")


def test_the_integer_product_is_exact_without_the_fast_kernel(monkeypatch):
    monkeypatch.setattr("areal_q.linear.quantized_linear.has_int_mm", lambda device: False)
    for k in (128, 1041, 4099):
        a = torch.randint(-127, 128, (5, k), dtype=torch.int8)
        a[0], b = 127, torch.full((3, k), 127, dtype=torch.int8)
        assert torch.equal(int8_matmul(a, b.t()).long(), a.long() @ b.long().t())


@pytest.mark.parametrize("fast", [True, False])
def test_the_integer_product_is_exact_inside_a_bfloat16_pass(monkeypatch, fast: bool):
    has_int_mm.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = has_int_mm("cpu")
        if not fast:
            monkeypatch.setattr("areal_q.linear.quantized_linear.has_int_mm", lambda device: False)
        a, b = torch.full((5, 1041), 127, dtype=torch.int8), torch.full((3, 1041), 126).char()
        assert torch.equal(int8_matmul(a, b.t()).long(), a.long() @ b.long().t())
    has_int_mm.cache_clear()
    assert found == has_int_mm("cpu")


def test_int8_linear_multiplies_dequantized_operands():
    x, weight, residual = torch.randn(9, 48), torch.randn(21, 48), torch.randn(9, 21)
    parts = INT8.quantize(weight, "w")
    codes, scale = quantize_rows(x)
    want = (codes.double() * scale) @ INT8.dequantize(parts).double().t()
    linear = linear_of(
        INT8, [{k: v[:8] for k, v in parts.items()}, {k: v[8:] for k, v in parts.items()}]
    )
    assert isinstance(linear, Int8Linear)
    torch.testing.assert_close(linear(x).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x, residual).double(), want + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        linear(x, residual[0]).double(), want + residual[0], rtol=1e-5, atol=1e-5
    )


def test_int8_linear_treats_a_row_alike_in_any_batch():
    x = torch.randn(64, 96)
    linear = linear_of(INT8, [INT8.quantize(torch.randn(40, 96), "w")])
    whole = linear(x)
    for rows in (slice(0, 1), slice(3, 20), slice(63, 64)):
        assert torch.equal(linear(x[rows]), whole[rows])


def test_float_linear_adds_a_bias():
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(
        FloatLinear(weight)(x, bias), torch.nn.functional.linear(x, weight, bias)
    )


@settings(max_examples=5, deadline=None)
@given(layers=st.integers(1, 3))
@every_format
def test_a_state_survives_the_round_trip_within_the_bound(name, layers):
    state = {"model.embed_tokens.weight": torch.randn(7, 8), "lm_head.weight": torch.randn(7, 8)}
    for i in range(layers):
        state[f"model.layers.{i}.input_layernorm.weight"] = torch.randn(8)
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.randn(6, 8)
        state[f"model.layers.{i}.self_attn.q_proj.bias"] = torch.randn(6)
        state[f"model.layers.{i}.mlp.down_proj.weight"] = torch.randn(8, 4)
    published = quantize_state(state, name)
    restored = dequantize_state(published, name)
    assert list(restored) == list(state)
    for key, tensor in state.items():
        if is_quantized(key):
            prefix = key.removesuffix("weight")
            parts = {s: published[prefix + s] for s in FORMATS[name].suffixes}
            bound = error_bound(name, parts)
            assert ((restored[key] - tensor).abs() <= bound).all()
        else:
            assert torch.equal(restored[key], tensor) and published[key].dtype == torch.float32


def test_int4_fp8_chooses_codes_for_the_engine_s_own_scales():
    # Group scales 448, 57 and 2⁻¹² times 2⁻¹⁰: the row's is 2⁻¹⁰, and E4M3 has 56 beside 448, not 57.
    weight = torch.zeros(1, 384)
    weight[0, [0, 128, 256]] = torch.tensor([448.0, 57.0, 2.0**-12]) * 7 * 2**-10
    weight[0, 129] = 2.5 * 56 * 2**-10
    parts = FORMATS["int4-fp8"].quantize(weight, "w")
    assert parts["weight_scale"].tolist() == [[448 * 2.0**-10, 57 * 2.0**-10, 2.0**-22]]
    real = FORMATS["int4-fp8"].dequantize(parts)
    assert real[0, [0, 128, 129, 256]].tolist() == [0.4375 * 7, 7 * 56 / 1024, 2 * 56 / 1024, 0.0]
    assert (real != 0).sum() == 3
