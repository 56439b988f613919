"""Weights that were stored in bfloat16 get back what rounding took, and then rounding hides no step."""

import msgspec
import pytest
import torch
from helpers.kinds import QUICKSTART
from torch import nn

from areal_q.config import load
from areal_q.models import Decoder, init_weights
from areal_q.models.low_bit.bf16_rounding import dither
from learner.build_policy import prepare_for_rounding


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
    one, other = stored(*[0.7, -0.7] * 25_000), stored(*[0.7, -0.7] * 25_000)
    spacing = 2.0**-8  # bfloat16 has seven digits behind the first
    assert dither(one, 1) and dither(other, 1)
    assert torch.equal(one.weight, other.weight)
    places = (one.weight.abs() - torch.tensor(0.7).bfloat16().float()) / spacing
    assert places.abs().max() < 0.5
    share, _ = torch.histogram(places, bins=10, range=(-0.5, 0.5))
    # A tenth each, within five standard deviations
    assert (share / 50_000 - 0.1).abs().max() < 5 * (0.09 / 50_000) ** 0.5
    assert not dither(other, 2)
    assert torch.equal(one.weight, other.weight), "numbers that bfloat16 does not hold stay"


def test_what_is_not_trained_or_no_bfloat16_number_stays():
    frozen, finer, fresh = stored(0.5, 0.25), stored(0.5, 0.25), stored(1.0, 1.0, 1.0)
    frozen.requires_grad_(False)
    with torch.no_grad():
        finer.weight[0, 0] = 0.1
    for layer in (frozen, finer, fresh):
        before = layer.weight.detach().clone()
        assert not dither(layer, 0)
        assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_rounded_weights_follow_steps_far_below_their_spacing(steps: int):
    """Steps of a fiftieth of bfloat16's spacing, as Adam's are: without dither none is seen, with it the mean
    over the weights moves by all of them."""
    step = 2.0**-8 / 50
    plain, dithered = stored(*[0.7, -0.7] * 25_000), stored(*[0.7, -0.7] * 25_000)
    dither(dithered, 0)
    moved = []
    with torch.no_grad():
        for weight in (plain.weight, dithered.weight):
            for _ in range(steps):
                weight.add_(step * weight.sign())
            moved.append((weight.bfloat16().double().abs().mean() - 0.69921875).item())
    assert moved[0] == 0
    assert moved[1] / (steps * step) == pytest.approx(1, abs=5 * (50 / steps / 50_000) ** 0.5)


@pytest.mark.parametrize(
    ("settings", "dithered"),
    [
        (["learner.dtype=bfloat16"], True),
        (["rollout.format=bf16"], True),
        (["rollout.format=bf16", "model.type=hf"], True),
        (["rollout.format=int8"], True),
        (["rollout.format=int8", "rollout.unquantized=fp32"], True),
        (["learner.dtype=bfloat16", "learner.lora={}"], False),
        (["learner.dtype=bfloat16", "model.type=small"], False),
    ],
)
def test_weights_of_a_pretrained_model_are_dithered(settings: list[str], dithered: bool):
    """An export has the dtype that they were stored in, if nothing else rounds them. UAQ's scale is a power of
    two, so that bfloat16 holds the scaled weights as well."""
    path = [] if "model.type=small" in settings else ["model.path=m"]
    base = [
        "model.type=pretrained",
        "learner.dtype=float32",
        "learner.uaq=2",
        "rollout.format=int8",
    ]
    run = load(None, [*base, *settings, *path])
    model = Decoder(msgspec.structs.replace(QUICKSTART, width=16, layers=1, mlp=24))
    init_weights(model, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    scaled = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].clone() / 2
    prepare_for_rounding(model, run)
    after = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(after.bfloat16(), scaled.bfloat16())
    assert torch.equal(after, scaled) != dithered
