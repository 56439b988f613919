"""Rounding at random: to one of the two numbers around, right in the mean."""

import pytest
import torch

from areal_q.config import Smoothing
from areal_q.models import Decoder, DecoderConfig, init_weights
from areal_q.quant import dequantize_state, is_quantized
from bench.learner.sixteen_bits import random_rows, random_weights
from rollout.evaluation.format_error import AnsweredText, Reference

CONFIG = DecoderConfig(
    family="llama", vocab_size=32, width=64, layers=1, heads=4, kv_heads=2, head_dim=16, mlp=96,
    max_positions=64, eos_ids=(1,),
)  # fmt: skip


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_random_weights_are_neighbours_and_right_in_the_mean(format: str):
    model = Decoder(CONFIG).requires_grad_(False)
    init_weights(model, seed=3)
    reference = Reference(model, [AnsweredText([3, 4, 5, 6, 7, 8, 9], 3)])
    folds = reference.folds(format, Smoothing())
    drawn = [
        dequantize_state(random_weights(reference, format, folds, seed), format)
        for seed in range(16)
    ]
    nearest = dequantize_state(reference.published(format, folds), format)
    for name in filter(is_quantized, nearest):
        wanted = folds[name].of(model.state_dict()[name])
        values = torch.stack([state[name] for state in drawn])
        error = (values.mean(0) - wanted).square().mean()
        assert error < (nearest[name] - wanted).square().mean() / 2, name
        assert max(len(values[:, i, i].unique()) for i in range(16)) == 2


def test_random_activations_are_neighbours_and_right_in_the_mean():
    torch.manual_seed(0)
    x = torch.randn(4, 256)
    codes, scale = random_rows(x)
    assert ((codes * scale - x).abs() <= scale * (1 + 1e-5)).all()
    mean = torch.stack([random_rows(x)[0] * scale for _ in range(256)]).mean(0)
    assert ((mean - x).abs() / scale).mean() < 0.05
