"""Number formats against hand-computed values, torch's own casts, and their stated error bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from areal_q.errors import QuantizationError
from areal_q.quant import FORMATS, dequantize_state, is_quantized, quantize_state
from areal_q.quant.linear import FloatLinear, Int8Linear, int8_matmul, quantize_rows

INT8, BF16 = FORMATS["int8"], FORMATS["bf16"]
TINY = torch.finfo(torch.float32).tiny

weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=33),
    elements=st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-1, 1, width=32),
).map(torch.from_numpy)


def test_int8_of_a_row_by_hand():
    # absmax 2.54 → scale 0.02; in the second row the scale is 1 and halves round to even
    parts = INT8.quantize(torch.tensor([[2.54, -2.54, 0.5, 0.0], [127.0, 0.5, 1.5, -2.5]]), "w")
    assert parts["weight"].tolist() == [[127, -127, 25, 0], [127, 0, 2, -2]]
    assert parts["weight"].dtype == torch.int8
    torch.testing.assert_close(parts["weight_scale"], torch.tensor([[0.02], [1.0]]))


@given(weights)
def test_dequantized_weights_lie_within_the_stated_bound(weight):
    for name in ("int8", "bf16"):
        try:
            parts = FORMATS[name].quantize(weight, "w")
        except QuantizationError:
            assert name == "bf16" and weight.abs().max() > 3.38e38
            continue
        gap = (FORMATS[name].dequantize(parts).double() - weight.double()).abs()
        bound = FORMATS[name].error_bound(parts).double().expand_as(gap)
        assert (gap <= bound).all()
        assert list(parts) == list(FORMATS[name].suffixes)


@given(weights)
def test_int8_error_is_at_most_half_a_scale(weight):
    parts = INT8.quantize(weight, "w")
    exact = parts["weight"].double() * parts["weight_scale"].double()
    slack = 0.5 * (1 + 2**-15)  # the division before rounding is float32: 127 · 2⁻²³ of a code
    assert ((exact - weight.double()).abs() <= slack * parts["weight_scale"].double()).all()
    assert parts["weight"].abs().max() <= 127


@given(weights)
def test_quantizing_a_dequantized_weight_gives_the_same_codes(weight):
    for name in ("int8", "bf16"):
        if name == "bf16" and weight.abs().max() > 3.38e38:
            continue
        parts = FORMATS[name].quantize(weight, "w")
        again = FORMATS[name].quantize(FORMATS[name].dequantize(parts), "w")
        assert torch.equal(again["weight"], parts["weight"])


def test_bf16_is_torchs_own_cast():
    weight = torch.randn(64, 33)
    assert torch.equal(BF16.quantize(weight, "w")["weight"], weight.bfloat16())


def test_rows_of_zeros_and_of_subnormals_keep_a_defined_scale():
    weight = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [TINY * 127, TINY], [1e-41, 3e-38]])
    parts = INT8.quantize(weight, "w")
    assert parts["weight"].tolist() == [[0, 0], [0, 0], [127, 1], [0, 3]]
    assert torch.equal(parts["weight_scale"], torch.full((4, 1), TINY))


def test_an_outlier_costs_precision_in_its_own_channel_only():
    weight = torch.randn(4, 64).clamp_(-3, 3)
    weight[2, 5] = 1e30
    gap = (INT8.dequantize(INT8.quantize(weight, "w")) - weight).abs().amax(1)
    assert gap[2] > 1 and (gap[[0, 1, 3]] < 0.02).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", list(FORMATS))
def test_nan_and_infinity_are_refused_by_name(name, bad):
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(QuantizationError, match=r"layers\.0\.q"):
        FORMATS[name].quantize(weight, "layers.0.q")


def test_what_bfloat16_cannot_hold_is_refused():
    with pytest.raises(QuantizationError, match="magnitude"):
        BF16.quantize(torch.full((1, 1), 3.4e38), "w")


def test_bits_per_weight_count_the_scales():
    stored = INT8.quantize(torch.randn(10, 128), "w")
    bits = 8 * sum(t.nbytes for t in stored.values()) / (10 * 128)
    assert INT8.bits_per_weight(10, 128) == bits == 8.25


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 5, 7), (17, 1040, 9), (2, 1041, 3), (64, 128, 256)]
)
def test_the_integer_product_is_exact(shape):
    m, k, n = shape
    a = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    a[0], b[0] = 127, -127
    assert torch.equal(int8_matmul(a, b.t()).long(), a.long() @ b.long().t())


def test_the_integer_product_is_exact_without_the_fast_kernel(monkeypatch):
    monkeypatch.setattr("areal_q.quant.linear._int_mm_is_exact", lambda device: False)
    for k in (128, 1041, 4099):
        a = torch.randint(-127, 128, (5, k), dtype=torch.int8)
        b = torch.full((3, k), 127, dtype=torch.int8)
        assert torch.equal(int8_matmul(a, b.t()).long(), a.long() @ b.long().t())


def test_int8_linear_multiplies_dequantized_activations_with_dequantized_weights():
    x, weight, residual = torch.randn(9, 48), torch.randn(21, 48), torch.randn(9, 21)
    parts = INT8.quantize(weight, "w")
    codes, scale = quantize_rows(x)
    want = (codes.double() * scale) @ INT8.dequantize(parts).double().t()
    linear = INT8.linear(
        [{k: v[:8] for k, v in parts.items()}, {k: v[8:] for k, v in parts.items()}]
    )
    assert isinstance(linear, Int8Linear)
    torch.testing.assert_close(linear(x).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x, residual).double(), want + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        linear(x, residual[0]).double(), want + residual[0], rtol=1e-5, atol=1e-5
    )


def test_int8_linear_treats_a_row_alike_in_any_batch():
    x = torch.randn(64, 96)
    linear = INT8.linear([INT8.quantize(torch.randn(40, 96), "w")])
    whole = linear(x)
    for rows in (slice(0, 1), slice(3, 20), slice(63, 64)):
        assert torch.equal(linear(x[rows]), whole[rows])


def test_float_linear_adds_a_bias():
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(
        FloatLinear(weight)(x, bias), torch.nn.functional.linear(x, weight, bias)
    )


@settings(max_examples=20)
@given(st.sampled_from(list(FORMATS)), st.integers(1, 3))
def test_a_state_survives_the_round_trip_within_the_bound(name, layers):
    state = {"model.embed_tokens.weight": torch.randn(7, 8), "lm_head.weight": torch.randn(7, 8)}
    for i in range(layers):
        state[f"model.layers.{i}.input_layernorm.weight"] = torch.randn(8)
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.randn(6, 8)
        state[f"model.layers.{i}.self_attn.q_proj.bias"] = torch.randn(6)
        state[f"model.layers.{i}.mlp.down_proj.weight"] = torch.randn(8, 5)
    published = quantize_state(state, name)
    restored = dequantize_state(published, name)
    assert list(restored) == list(state)
    for key, tensor in state.items():
        if is_quantized(key):
            assert (restored[key] - tensor).abs().max() <= tensor.abs().max() / 100
            assert published[key].dtype in (torch.int8, torch.bfloat16)
        else:
            assert torch.equal(restored[key], tensor) and published[key].dtype == torch.float32


def test_only_the_decoders_linears_are_quantized():
    assert is_quantized("model.layers.11.self_attn.o_proj.weight")
    assert is_quantized("model.layers.0.mlp.gate_proj.weight")
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.mlp.gate.weight",
    ):
        assert not is_quantized(name)
