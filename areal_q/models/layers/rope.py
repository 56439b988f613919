"""Rotary position embeddings (RoFormer, arXiv 2104.09864) in Hugging Face's half-rotated layout.

Channel i is paired with channel i + head_dim/2 (not with its neighbour), as Qwen2, Qwen3 and Llama checkpoints
expect. The learner's decoder and the reference engine both use these functions. The angles are float32 whatever
the dtype of the weights.
"""

import torch
from torch import Tensor

from areal_q.models.config import DecoderConfig
from areal_q.models.rope_scaling import turned_by


def rope_tables(
    config: DecoderConfig, length: int | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), each float32 [length, head_dim]; row p belongs to position p. Some ways to
    stretch RoPE multiply both by a constant.

    `length` defaults to the model's max_positions.
    """
    frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float32)
    frequencies = frequencies.to(device, non_blocking=True)
    positions = torch.arange(
        config.max_positions if length is None else length, dtype=torch.float32, device=device
    )
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    by = turned_by(config.rope_scaling)
    return angles.cos() * by, angles.sin() * by


def no_rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tables of the shape of `cos` and `sin` that leave every head as it is, to the bit."""
    return torch.ones_like(cos), torch.zeros_like(sin)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` [..., heads, head_dim] rotated by the angles of its tokens, whose rows of the tables are
    `cos` and `sin` [..., head_dim].

    Example: apply_rope(q, cos[positions], sin[positions]), q [T, heads, head_dim], positions [T].
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)).to(x.dtype)
