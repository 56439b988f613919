"""The kinds of models and number formats that tests run over.

VARIANTS are transformers' configurations of what the decoder has: families, biases, windows, ways to stretch
RoPE. Each takes a shape of two layers or more.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from areal_q.models import DecoderConfig
from areal_q.quant import FORMATS

E4M3 = torch.float8_e4m3fn
every_format = pytest.mark.parametrize("name", list(FORMATS))
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}

NO_PAD: dict[str, Any] = {"pad_token_id": None}

VARIANTS: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": lambda **shape: Qwen2Config(**shape),
    "qwen2, yarn": lambda **shape: Qwen2Config(**shape, rope_parameters=YARN),
    "qwen2, windows from layer 1 on": lambda **shape: Qwen2Config(
        **shape, **WINDOW, max_window_layers=1
    ),
    "qwen3": lambda **shape: Qwen3Config(**shape, rms_norm_eps=1e-5),
    "qwen3, a window in layer 0, biases": lambda **shape: Qwen3Config(
        **shape,
        **WINDOW,
        attention_bias=True,
        layer_types=["sliding_attention"] + ["full_attention"] * (shape["num_hidden_layers"] - 1),
    ),
    "llama": lambda **shape: LlamaConfig(**shape),
    "llama, llama3": lambda **shape: LlamaConfig(**shape, rope_parameters=LLAMA3),
    "llama, linear, biases": lambda **shape: LlamaConfig(
        **shape, **BIASES, rope_parameters={"rope_type": "linear", "factor": 3.0}
    ),
    "llama, yarn of other numbers": lambda **shape: LlamaConfig(
        **shape,
        rope_parameters=YARN
        | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "truncate": False},
    ),
    "llama, yarn with a factor for attention": lambda **shape: LlamaConfig(
        **shape, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
    "mistral": lambda **shape: MistralConfig(**shape, sliding_window=None),
    "mistral, windows": lambda **shape: MistralConfig(**shape, sliding_window=4),
    "smollm3": lambda **shape: SmolLM3Config(
        **shape | NO_PAD, no_rope_layers=[1, 0] * (shape["num_hidden_layers"] // 2)
    ),
    "smollm3, windows, biases": lambda **shape: SmolLM3Config(
        **shape | NO_PAD, **WINDOW, **BIASES, no_rope_layer_interval=2
    ),
    "seed_oss": lambda **shape: SeedOssConfig(**shape),
    "seed_oss, all biases": lambda **shape: SeedOssConfig(
        **shape, attention_out_bias=True, mlp_bias=True
    ),
}


def config_of(variant: str, shape: dict[str, Any], **more: Any) -> PreTrainedConfig:
    """Returns transformers' configuration of a model of `shape`."""
    return VARIANTS[variant](**shape | more)


QUICKSTART = DecoderConfig(
    family="qwen3", vocab_size=19, width=128, layers=3, heads=4, kv_heads=2, head_dim=32, mlp=384,
    max_positions=256,
)  # fmt: skip
SMOLLM2 = DecoderConfig(
    family="llama", vocab_size=49_152, width=576, layers=30, heads=9, kv_heads=3, head_dim=64, mlp=1536,
    max_positions=8192,
)  # fmt: skip
M20 = DecoderConfig(
    family="qwen3", vocab_size=16_384, width=384, layers=8, heads=6, kv_heads=2, head_dim=64, mlp=1152,
    max_positions=4096,
)  # fmt: skip
HALF_A_BILLION = DecoderConfig(
    family="qwen2", vocab_size=151_936, width=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864,
    max_positions=4096, qkv_bias=True,
)  # fmt: skip
"""Shapes of the models whose runs and benches were measured."""
