"""The fused operations against their plain torch twins; where it matters, to the bit."""

import math
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.engines import ask, generate
from helpers.policies import pack_state
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_q.config import TorchEngine
from areal_q.config.engines import PAGE
from areal_q.kernels import cpu_activations, decoding
from areal_q.kernels.cpu_math import exp
from areal_q.linear.cpu_linear import cpu_linear
from areal_q.linear.quantized_linear import Fp8GroupLinear, Fp8RowLinear, Int8Linear
from areal_q.models.config import DecoderConfig
from areal_q.models.layers.mlp import GATED
from areal_q.quant.activations import (
    dequantize_groups,
    quantize_groups_e4m3,
    quantize_rows,
    quantize_rows_e4m3,
)
from rollout.engines.reference import build_ops
from rollout.engines.reference.kv_cache import KVCache
from rollout.engines.reference.ops import TorchOps
from rollout.engines.reference.ops_numba import FusedOps
from rollout.engines.reference.sampling import seed_keys

TORCH, FUSED = TorchOps(), FusedOps()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=70),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
        | st.floats(-1, 1, width=32),
    )
)
def test_codes_and_scales_are_those_of_quantize_rows_to_the_bit(x):
    codes, scales = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    cpu_activations.int8_rows(x, 0, codes.view(np.uint8), scales)
    want_codes, want_scales = quantize_rows(torch.from_numpy(x))
    assert (codes == want_codes.numpy()).all()
    assert (scales == want_scales[:, 0].numpy()).all()


ANY_ROWS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=300),
    elements=st.floats(width=32) | st.floats(-1, 1, width=32) | st.sampled_from([0.0, 1e-9, 448.0]),
)


@given(ANY_ROWS)
def test_e4m3_activations_equal_the_plain_formats_bits(x):
    """NaN and infinity included: they must reach the log-prob."""
    numbers, scales = np.empty(x.shape, np.float32), np.empty(len(x), np.float32)
    with np.errstate(all="ignore"):
        cpu_activations.e4m3_rows(x, numbers, scales)
        grouped = np.empty(x.shape, np.float32)
        cpu_activations.e4m3_groups(x, grouped)
    codes, want = quantize_rows_e4m3(torch.from_numpy(x))
    np.testing.assert_array_equal(numbers, codes.float().numpy())
    np.testing.assert_array_equal(scales, want[:, 0].numpy())
    want_grouped = dequantize_groups(*quantize_groups_e4m3(torch.from_numpy(x)))
    np.testing.assert_array_equal(grouped, want_grouped.numpy())


def test_e4m3_numbers_and_middles_round_as_in_torch():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    middles = (every[1:] + every[:-1]) / 2
    x = torch.cat((every, middles, torch.tensor([448.0])))[None]
    numbers, scales = np.empty(x.shape, np.float32), np.empty(1, np.float32)
    cpu_activations.e4m3_rows(x.numpy(), numbers, scales)
    assert scales.tolist() == [1.0]
    assert torch.equal(torch.from_numpy(numbers), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("kind", [Fp8RowLinear, Fp8GroupLinear])
def test_an_fp8_linear_is_the_plain_one(kind, added):
    torch.manual_seed(1)
    weight = torch.randn(48, 160).to(torch.float8_e4m3fn)
    plain = (
        kind(weight.float(), torch.rand(48, 1)) if kind is Fp8RowLinear else kind(weight.float())
    )
    x = torch.randn(5, 160)
    add = {"nothing": None, "bias": torch.randn(48), "residual": torch.randn(5, 48)}[added]
    assert cpu_linear(plain) is not plain
    torch.testing.assert_close(cpu_linear(plain)(x, add), plain(x, add), rtol=1e-5, atol=1e-5)


def test_halves_are_rounded_to_even():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]], np.float32)
    codes, scales = np.empty(x.shape, np.int8), np.empty(1, np.float32)
    cpu_activations.int8_rows(x, 0, codes.view(np.uint8), scales)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 126]] and scales.tolist() == [1.0]


@pytest.mark.parametrize("added", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_int8_linear_is_the_plain_one(rows, added):
    torch.manual_seed(rows)
    codes = torch.randint(-127, 128, (48, 33), dtype=torch.int8)
    plain = Int8Linear(codes, torch.rand(48, 1) / 127)
    x = torch.randn(rows, 33)
    add = {"nothing": None, "bias": torch.randn(48), "residual": torch.randn(rows, 48)}[added]
    close(cpu_linear(plain)(x, add), plain(x, add))


@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 33), (64, 128)])
def test_norm_and_gated_products_are_the_plain_ones(rows, width):
    torch.manual_seed(width)
    x, weight = 3 * torch.randn(rows, 2 * width), torch.randn(2 * width)
    close(FUSED.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6))
    x[0, 0], x[0, 1] = 300.0, -300.0  # the exponential overflows, and gpt-oss clamps
    for activation in GATED:
        close(FUSED.gated(x, activation), TORCH.gated(x, activation))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dim", [2, 10, 64])
def test_rotation_is_the_plain_one_and_leaves_values_alone(dim, normed):
    torch.manual_seed(dim)
    qkv = torch.randn(5, 8, dim)
    norm = torch.randn(6, dim) if normed else None
    angles = torch.randn(5, dim // 2).repeat(1, 2)
    fused, plain = qkv.clone(), qkv.clone()
    for ops, x in ((FUSED, fused), (TORCH, plain)):
        ops.rotate(x, 6, norm, 1e-6, angles.cos(), angles.sin())
    close(fused, plain)
    assert torch.equal(fused[:, 6:], qkv[:, 6:]) and not torch.equal(fused[:, :6], qkv[:, :6])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 32), (8, 1, 20)])
def test_decode_attention_is_the_plain_one_and_caches_the_same(heads, kv_heads, dim, sinks):
    torch.manual_seed(heads)
    config = DecoderConfig(
        family="llama", vocab_size=9, width=heads * dim, layers=2, heads=heads,
        kv_heads=kv_heads, head_dim=dim, mlp=8, max_positions=200,
    )  # fmt: skip
    positions = torch.tensor([0, 1, 15, 16, 63, 99])
    tables = 1 + torch.randperm(6 * 7).view(6, 7)
    cached = [torch.randn(2, kv_heads, 43, PAGE, dim) for _ in range(2)]
    qkv = 2 * torch.randn(6, heads + 2 * kv_heads, dim)
    scores = 5 * torch.randn(heads) if sinks else None
    if scores is not None:
        scores[0] = 200.0  # all else vanishes beside it
    outs, caches = [], []
    for ops in (FUSED, TORCH):
        cache = KVCache(config, "cpu")
        cache.layers = [layer.clone() for layer in cached]
        outs.append(ops.decode(cache, tables, positions, 100)(1, qkv, scores))
        caches.append(cache.layers[1])
    close(outs[0], outs[1])
    assert torch.equal(caches[0], caches[1]) and not torch.equal(caches[0], cached[1])


def test_uniform_numbers_are_the_same_to_the_bit():
    keys = seed_keys([*range(500), -1, 2**63, 2**64 - 1])
    positions = torch.arange(len(keys)) * 7
    assert torch.equal(FUSED.uniform(keys, positions), TORCH.uniform(keys, positions))


def test_exp_is_accurate_to_two_units_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 20_001)]).astype(
        np.float32
    )
    got = np.array([exp(v) for v in x])
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() < 2 * 2.0**-23
    assert exp(np.float32(-np.inf)) == 0 and np.isnan(exp(np.float32(np.nan)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(bad):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16), torch.ones(16)
    x[1, 4] = bad
    linear = cpu_linear(
        Int8Linear(torch.randint(-127, 128, (8, 16), dtype=torch.int8), torch.ones(8))
    )
    results = [
        linear(x),
        FUSED.rms_norm(x, weight, 1e-6),
        FUSED.gated(x, "silu"),
    ]
    for y in results:
        finite = y.isfinite().all(1)
        assert finite.tolist() == [True, False, True]


def test_an_engine_draws_the_same_responses_either_way():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.25,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    weights = pack_state(model.state_dict(), config.to_dict(), "int8")
    requests = [ask(range(1, 2 + i), 4, i, [7], max_tokens=20) for i in range(6)]
    configs = [TorchEngine(slots=16, fused=fused) for fused in (True, False)]
    fused, plain = (
        list(chain.from_iterable(generate(weights, *requests, config=config))) for config in configs
    )
    same = [
        a.response_ids.tolist() == b.response_ids.tolist()
        for a, b in zip(fused, plain, strict=True)
    ]
    # A rounding difference of 1e-7 may tip an activation to the next code, and then seldom a token.
    assert np.mean(same) > 0.9
    gaps = np.concatenate(
        [np.abs(a.logprobs - b.logprobs) for a, b, s in zip(fused, plain, same, strict=True) if s]
    )
    assert np.quantile(gaps, 0.95) < 1e-4


def test_plain_torch_runs_where_asked():
    assert isinstance(build_ops(TorchEngine()), FusedOps)
    assert isinstance(build_ops(TorchEngine(fused=False)), TorchOps)
    assert isinstance(build_ops(TorchEngine(device="cuda")), TorchOps)


def test_a_kernel_is_compiled_where_its_cache_has_no_place():
    namespace: dict = {}
    exec("def twice(x):\n    return 2 * x", namespace)  # no file, so nothing to cache beside
    assert decoding.kernel()(namespace["twice"])(21) == 42
