"""Weights that were stored in bfloat16 get back what rounding took, and then rounding hides no step."""

import pytest
import torch
from torch import nn

from areal_q.models.low_bit.bf16_rounding import dither


def stored(*values: float) -> nn.Linear:
    """A layer whose weight is these numbers, as a checkpoint in bfloat16 has them, in float32."""
    layer = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).bfloat16().float())
    return layer


def test_dithered_weights_round_to_what_they_were():
    layer = stored(
        *torch.randn(100_000, generator=torch.Generator().manual_seed(0)).tolist(),
        1.0,
        -2.0,
        3e38,
        1e-40,
        *[0.0] * 3,
    )
    before = layer.weight.detach().clone()
    dither(layer, 0)
    assert torch.equal(layer.weight.bfloat16(), before.bfloat16())
    assert (layer.weight != before).float().mean() > 0.999
    assert not layer.weight[before == 0].any()


def test_the_digits_are_spread_evenly_and_known_by_the_seed():
    one, other = stored(*[0.7] * 50_000), stored(*[0.7] * 50_000)
    spacing = 2.0**-8  # bfloat16 has seven digits behind the first
    dither(one, 1)
    dither(other, 1)
    assert torch.equal(one.weight, other.weight)
    places = (one.weight - torch.tensor(0.7).bfloat16().float()) / spacing
    assert places.abs().max() < 0.5
    share, _ = torch.histogram(places, bins=10, range=(-0.5, 0.5))
    # A tenth each, within five standard deviations
    assert (share / 50_000 - 0.1).abs().max() < 5 * (0.09 / 50_000) ** 0.5
    dither(other, 2)
    assert torch.equal(one.weight, other.weight), "numbers that bfloat16 does not hold stay"


def test_what_is_not_trained_or_no_bfloat16_number_stays():
    frozen, finer = stored(0.5, 0.25), stored(0.5, 0.25)
    frozen.requires_grad_(False)
    with torch.no_grad():
        finer.weight[0, 0] = 0.1
    for layer in (frozen, finer):
        before = layer.weight.detach().clone()
        dither(layer, 0)
        assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_rounded_weights_follow_steps_far_below_their_spacing(steps: int):
    """Steps of a fiftieth of bfloat16's spacing, as Adam's are: without dither none is seen, with it the mean
    over the weights moves by all of them."""
    step = 2.0**-8 / 50
    plain, dithered = stored(*[0.7] * 50_000), stored(*[0.7] * 50_000)
    dither(dithered, 0)
    moved = []
    with torch.no_grad():
        for weight in (plain.weight, dithered.weight):
            for _ in range(steps):
                weight.add_(step)
            moved.append((weight.bfloat16().double().mean() - 0.69921875).item())
    assert moved[0] == 0
    assert moved[1] / (steps * step) == pytest.approx(1, abs=5 * (50 / steps / 50_000) ** 0.5)
