r"""The operations between the GEMMs of a decoder, in plain torch or, on a CPU, fused (ops_numba.py).

`TorchOps` is the reference and runs on any device. Everything is float32 unless stated. Notation: T tokens, R
decoding rows, D width, V vocabulary.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from areal_q.config import Sampling
from areal_q.models.layers.rope import apply_rope
from areal_q.quant.quantized_linear import Linear
from rollout.engines.reference.kv_cache import Attend, DecodeAttention, KVCache
from rollout.engines.reference.sampling import random_uniform, sample_untruncated


class Ops(Protocol):
    def linear(self, linear: Linear) -> Linear:
        """`linear`, or a faster one with the same results."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of x [T, D] with weight [D]."""
        ...

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        """RoPE, in place, of the first `heads` heads (q's and k's) of qkv [T, heads + kv_heads,
        head_dim], after an RMSNorm of each with weights `norm` [heads, head_dim] if there are any;
        cos and sin [T, head_dim]."""
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Returns silu(gate) · up: [T, 2 · mlp] → [T, mlp]."""
        ...

    def decode(self, cache: KVCache, positions: Tensor, length: int) -> Attend:
        """Returns attention of one query a row, as kv_cache.DecodeAttention does."""
        ...

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Returns random numbers as sampling.random_uniform does."""
        ...

    def draw(self, logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens and log-probs as sampling.sample_untruncated does."""
        ...


class TorchOps:
    def linear(self, linear: Linear) -> Linear:
        return linear

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        qk = qkv[:, :heads]
        normed = qk if norm is None else F.rms_norm(qk, qk.shape[-1:], eps=eps).mul_(norm)
        qk.copy_(apply_rope(normed, cos, sin))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def decode(self, cache: KVCache, positions: Tensor, length: int) -> Attend:
        return DecodeAttention(cache, positions, length)

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        return random_uniform(keys, positions)

    def draw(self, logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
        return sample_untruncated(logits, sampling, u)
