"""Scales that stay, and the numbers that tell how much moved."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.errors import QuantizationError
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.code_changes import codes_moved
from areal_q.quant.format import Ranges
from areal_q.quant.state_dict import fused_name
from areal_q.quant.sticky_scales import StickyRanges
from bench.weights.quantize import normalized_error

LAYER = "model.layers.0"
SCALED = [name for name in FORMATS if name != "bf16"]


def ranges(value: float) -> Ranges:
    return Ranges(torch.tensor([[value]]), torch.tensor(value))


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{LAYER}.{name}.weight": torch.randn(64, 256, generator=generator) * 0.02
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    }


def stepped(state: dict[str, torch.Tensor], lr: float, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: w + lr * torch.randn(w.shape, generator=generator).sign() for key, w in state.items()
    }


def test_range_stays_between_its_bounds_and_is_recentred_beyond():
    sticky = StickyRanges(0.1)
    used = [float(sticky("w", ranges(m)).blocks) for m in (1.0, 1.05, 0.95, 1.11, 1.15, 1.0, 0.5)]
    assert used[0] == used[1] == used[2] and used[3] == used[4]
    assert used[3] == pytest.approx(1.11 * 1.1) and used[6] == pytest.approx(0.5 * 1.1)


def test_a_range_at_its_very_bounds_stays():
    sticky = StickyRanges(1.0)
    assert [float(sticky("w", ranges(m)).whole) for m in (1.0, 2.0, 0.5)] == [2.0, 2.0, 2.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=30), st.floats(0.001, 1.0))
def test_no_range_is_exceeded_or_larger_than_its_bound(measured, drift):
    sticky = StickyRanges(drift)
    for m in measured:
        used = float(sticky("w", ranges(m)).blocks)
        assert m <= used <= m * (1 + drift) ** 2 * (1 + 1e-5)


def test_going_up_and_down_within_the_bound_moves_nothing():
    sticky = StickyRanges(0.05)
    used = {float(sticky("w", ranges(m)).whole) for m in [1.0, 1.04, 0.97] * 20}
    assert len(used) == 1


def test_parameters_have_ranges_of_their_own():
    sticky = StickyRanges(0.1)
    assert float(sticky("a", ranges(1.0)).whole) != float(sticky("b", ranges(2.0)).whole)


def test_a_drift_bound_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="positive"):
        StickyRanges(0.0)


@pytest.mark.parametrize("name", SCALED)
def test_sticky_scales_stay_put_while_the_weights_move_a_little(name):
    state, sticky = state_of(), StickyRanges(0.05)
    first = quantize_state(state, name, sticky)
    after = stepped(state, 1e-6, 1)
    second = quantize_state(after, name, sticky)
    codes = FORMATS[name].suffixes[0]
    for key, tensor in first.items():
        if not key.endswith("." + codes):
            assert torch.equal(second[key].view(torch.uint8), tensor.view(torch.uint8)), key
    measured = [quantize_state(s, name) for s in (state, after)]
    assert codes_moved(first, second, name) <= codes_moved(measured[0], measured[1], name) + 1e-4


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", SCALED)
def test_restored_ranges_give_the_same_bits(name):
    states, sticky, again = [state_of()], StickyRanges(0.05), StickyRanges(0.05)
    for seed in range(3):
        states.append(stepped(states[-1], 2e-3, seed))
    quantize_state(states[0], name, sticky)
    last = quantize_state(states[1], name, sticky)
    again.restore({n: t.clone() for n, t in sticky.tensors().items()})
    assert_same(quantize_state(states[1], name, again), last)
    for state in states[2:]:
        last = quantize_state(state, name, sticky)
        assert_same(quantize_state(state, name, again), last)
    anew = quantize_state(states[-1], name, StickyRanges(0.05))
    assert any(
        not torch.equal(t.view(torch.uint8), anew[key].view(torch.uint8)) for key, t in last.items()
    )


def test_ranges_of_another_shape_are_not_gone_on_with():
    state, sticky, again = state_of(), StickyRanges(0.05), StickyRanges(0.05)
    quantize_state(state, "fp8", sticky)
    again.restore(sticky.tensors())
    assert_same(
        quantize_state(state, "int4", again), quantize_state(state, "int4", StickyRanges(0.05))
    )


@given(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=20),
    st.floats(1e-9, 1),
)
def test_ranges_chosen_for_weights_stay_for_the_same_weights(sizes: list[float], drift: float):
    sticky = StickyRanges(drift)
    for m in sizes:
        chosen = [float(sticky("w", ranges(m)).blocks) for _ in range(3)]
        assert len(set(chosen)) == 1 and chosen[0] >= m


@pytest.mark.parametrize("name", SCALED)
def test_sticky_scales_cost_little_precision(name):
    state, sticky = state_of(), StickyRanges(0.05)
    for seed in range(4):
        quantize_state(state, name, sticky)
        state = stepped(state, 1e-4, seed)
    error = normalized_error(state, quantize_state(state, name, sticky), name)
    assert error <= 1.35 * normalized_error(state, quantize_state(state, name), name)


def test_linears_that_an_engine_fuses_share_the_tensor_s_scale():
    state = state_of()
    state[f"{LAYER}.self_attn.q_proj.weight"] *= 10
    published = quantize_state(state, "nvfp4")
    shared = {}
    for key in state:
        divisor = float(published[key.removesuffix("weight") + "weight_global_scale"])
        assert shared.setdefault(fused_name(key), divisor) == divisor
        own = 448 * 6 / float(state[key].abs().max())
        assert divisor <= own * (1 + 1e-6)
    assert len(set(shared.values())) == 3  # q and k share; up and down have their own
    assert normalized_error(state, published, "nvfp4") < 0.02


def test_the_quantization_error_is_the_one_worked_by_hand():
    name = f"{LAYER}.mlp.up_proj.weight"
    published = quantize_state({name: torch.tensor([[3.0, 127.0, 0.25]])}, "int8")
    assert normalized_error(
        {name: torch.tensor([[3.0, 127.0, 0.25]])}, published, "int8"
    ) == pytest.approx(0.0625 / (9 + 127**2 + 0.0625), rel=1e-5)


@pytest.mark.parametrize("name", list(FORMATS))
def test_moved_codes_are_counted_however_they_are_packed(name):
    key = f"{LAYER}.mlp.up_proj.weight"
    weight = torch.full((4, 256), 0.5)
    weight[:, ::16] = 1.0
    other = weight.clone()
    other[1, 3], other[2, 17] = -0.5, -0.5
    moved = codes_moved(
        quantize_state({key: weight}, name), quantize_state({key: other}, name), name
    )
    assert moved == pytest.approx(2 / 1024)
    assert codes_moved({}, {}, name) == 0.0


def test_moved_codes_are_counted_to_the_end_of_a_large_weight():
    key = f"{LAYER}.mlp.up_proj.weight"
    weight = torch.ones(1024, 320)
    other = weight.clone()
    other[0, 0] = other[-1, -1] = -1.0
    before, after = (quantize_state({key: w}, "int8") for w in (weight, other))
    assert codes_moved(before, after, "int8") == 2 / weight.numel()
    turned = [quantize_state({key: w}, "int4") for w in (weight, -weight)]
    assert codes_moved(turned[0], turned[1], "int4") == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.5 * 2.0**127])
@pytest.mark.parametrize("format", FORMATS)
def test_a_refused_weight_leaves_the_ranges_as_they_were(format: str, bad: float):
    sticky, name = StickyRanges(0.05), "model.layers.0.mlp.up_proj.weight"
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    quantize_state({name: weight}, format, sticky)
    before = sticky.tensors()
    spoilt = weight.clone()
    spoilt[3, 5] = bad
    for policy in (sticky, None):
        with pytest.raises(QuantizationError, match=re.escape(name)):
            quantize_state({name: spoilt}, format, policy)
    assert all(torch.equal(value, before[key]) for key, value in sticky.tensors().items())
