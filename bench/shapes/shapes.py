"""The three shapes, as models of transformers with random weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from areal_q.config import SmallModel
from areal_q.weights.version import WeightVersion
from bench.weights.packed import packed


@dataclass(frozen=True)
class Shape:
    name: str
    config: Any
    tokens: int
    """Tokens that each sequence draws"""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns (inputs, outputs) of a layer's products, by name."""
        c = self.config
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        q, kv = c.num_attention_heads * head, c.num_key_value_heads * head
        width, mlp = c.hidden_size, c.intermediate_size
        return {
            "qkv": (width, q + 2 * kv),
            "o": (q, width),
            "gate_up": (width, 2 * mlp),
            "down": (mlp, width),
        }

    @property
    def head(self) -> tuple[int, int]:
        """Returns (inputs, outputs) of the output head's product."""
        return self.config.hidden_size, self.config.vocab_size

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self.config, dtype=dtype).eval()


def _small() -> Any:
    shape = SmallModel()
    return _qwen3(
        64, shape.width, shape.mlp, shape.layers, shape.heads, shape.kv_heads, shape.max_positions
    )


def _qwen3(
    vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, positions: int
) -> Any:
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )


def _qwen2_half_a_billion() -> Any:
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6M", _small(), 32),
        Shape("20M", _qwen3(16_384, 384, 1152, 8, 6, 2, 4096), 32),
        Shape("0.5B", _qwen2_half_a_billion(), 24),
    )
}


def published(state: dict[str, Tensor], shape: Shape, format: str) -> WeightVersion:
    """Returns `state`, bfloat16, as a learner publishes it."""
    return packed(state, format, shape.config.to_dict())
