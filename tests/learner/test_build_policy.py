"""The weights that a learner begins with."""

import msgspec
import pytest
import torch
from helpers.kinds import QUICKSTART

from areal_q.config import load
from areal_q.models import Decoder, init_weights
from learner.build_policy import prepare_for_rounding


@pytest.mark.parametrize(
    ("settings", "dithered"),
    [
        (["learner.dtype=bfloat16"], True),
        (["rollout.format=bf16"], True),
        (["rollout.format=bf16", "model.type=hf"], True),
        (["rollout.format=int8"], False),
        (["learner.dtype=bfloat16", "learner.lora={}"], False),
        (["learner.dtype=bfloat16", "model.type=small"], False),
    ],
)
def test_weights_are_dithered_where_something_rounds_to_bfloat16(
    settings: list[str], dithered: bool
):
    """UAQ's scale is a power of two, so that bfloat16 holds the scaled weights as well."""
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
