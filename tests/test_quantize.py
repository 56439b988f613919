"""`areal-q quantize`: what it refuses, and that nothing is left behind then."""

import pytest
import torch

from areal_q.errors import CheckpointError
from areal_q.models import Decoder, DecoderConfig, init_weights, save_decoder
from areal_q.quantize import quantize

CONFIG = DecoderConfig(
    family="qwen3", vocab_size=24, width=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=48,
    max_positions=64,
)  # fmt: skip


def test_a_weight_beyond_the_format_is_named_and_leaves_nothing_behind(tmp_path):
    model = Decoder(CONFIG)
    init_weights(model, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = 3e38
    save_decoder(model, tmp_path / "source")
    with pytest.raises(CheckpointError, match=rf"source: {name}: holds .* above 2\^127"):
        quantize(tmp_path / "source", tmp_path / "made", "int8", torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
