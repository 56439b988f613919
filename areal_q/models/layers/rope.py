"""Rotary position embeddings (RoFormer, arXiv 2104.09864) in Hugging Face's half-rotated layout.

Channel i is paired with channel i + head_dim/2 (not with its neighbour), as Qwen2, Qwen3 and Llama checkpoints
expect. The learner's decoder and the reference engine both use these functions. The angles are float32 whatever
the dtype of the weights.
"""

import torch
from torch import Tensor

from areal_q.models.config import DecoderConfig, Rope
from areal_q.models.rope_scaling import turned_by


def rope_tables(
    config: DecoderConfig,
    length: int | None = None,
    device: torch.device | str = "cpu",
    rope: Rope = "model",
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin) of `rope`, each float32 [length, head_dim], or of as many channels as RoPE turns; row
    p belongs to position p. Some ways to stretch RoPE multiply both by a constant.

    `length` defaults to the model's max_positions.
    """
    frequencies = torch.tensor(config.inverse_frequencies(rope), dtype=torch.float32)
    frequencies = frequencies.to(device, non_blocking=True)
    positions = torch.arange(
        config.max_positions if length is None else length, dtype=torch.float32, device=device
    )
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    by = turned_by(config.rope_scaling) if rope == "model" else 1.0
    return angles.cos() * by, angles.sin() * by


class RopeOfLayers:
    """The tables of `rope_tables` for each layer of a model: those of layers of one kind are computed once."""

    def __init__(
        self, config: DecoderConfig, length: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.kinds: list[Rope | None] = [config.rope_of(layer) for layer in range(config.layers)]
        self.tables: dict[Rope | None, tuple[Tensor, Tensor]] = {}
        for kind in self.kinds:
            if kind not in self.tables:
                self.tables[kind] = rope_tables(config, length, device, kind or "model")
        if None in self.tables:
            self.tables[None] = no_rotation(*self.tables[None])

    def at(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each layer's (cos, sin) of tokens at `positions` int64 [T], float32 [T, head_dim] each."""
        found = {
            kind: (cos.index_select(0, positions), sin.index_select(0, positions))
            for kind, (cos, sin) in self.tables.items()
        }
        return [found[kind] for kind in self.kinds]


def no_rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tables of the shape of `cos` and `sin` that leave every head as it is, to the bit."""
    return torch.ones_like(cos), torch.zeros_like(sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` [..., heads, head_dim] rotated by the angles of its tokens, whose rows of the tables are
    `cos` and `sin` [..., head_dim]; narrower ones turn the first channels alone.

    Example: apply_rope(q, cos[positions], sin[positions]), q [T, heads, head_dim], positions [T].
    """
    turned, rest = x.tensor_split((cos.shape[-1],), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    turned = (turned * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
