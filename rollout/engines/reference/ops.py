r"""The operations between the GEMMs of a decoder, in plain torch or, on a CPU, fused (ops_numba.py).

`TorchOps` is the reference and runs on any device. Everything is float32 unless stated. Notation: T tokens, R
decoding rows, D width, V vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from areal_q.linear.quantized_linear import Linear
from areal_q.linear.registry import linear_of
from areal_q.models.config import Activation
from areal_q.models.layers.mlp import GATED
from areal_q.models.layers.rope import apply_rope
from areal_q.quant.format import Format, Parts
from rollout.engines.reference.kv_cache import Attend, DecodeAttention, KVCache
from rollout.engines.reference.sampling import Knobs, draw, random_uniform


class Table(Protocol):
    """An embedding, or an output head, or both."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the rows of `tokens` int64 [T], float32 [T, D]."""
        ...

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the logits, float32 [R, V], of hidden states [R, D]."""
        ...


class FloatTable:
    """A table of float numbers [V, D]; a head is float32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).float()

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class Ops(Protocol):
    def linear(self, format: Format, parts: Sequence[Parts]) -> Linear:
        """Returns x ↦ x · Wᵀ, with the weights of `parts` stacked over outputs."""
        ...

    def tables(self, embedding: Tensor, head: Tensor | None) -> tuple[Table, Table]:
        """Returns the embedding and the output head, given their published weights; None: the embedding is
        the head."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of x [T, D] with weight [D]."""
        ...

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        """Applies RoPE in place to the first `heads` heads, those of q and k, of qkv [T, heads + kv_heads,
        head_dim], with cos and sin [T, head_dim]. If `norm` [heads, head_dim] is given, it is the weight of an
        RMSNorm of each head before that."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Returns the function of gate and up that mlp.GATED has of `activation`: [T, 2 · mlp] → [T, mlp]."""
        ...

    def decode(self, cache: KVCache, tables: Tensor, positions: Tensor, length: int) -> Attend:
        """Returns attention of one query in each row, with the results of kv_cache.DecodeAttention."""
        ...

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Returns the random numbers of sampling.random_uniform, float64 [R]."""
        ...

    def draw(self, logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens int64 [R] and log-probs float32 [R], drawn as in sampling.draw."""
        ...


class TorchOps:
    def linear(self, format: Format, parts: Sequence[Parts]) -> Linear:
        return linear_of(format, parts)

    def tables(self, embedding: Tensor, head: Tensor | None) -> tuple[Table, Table]:
        if head is None:
            both = FloatTable(embedding.float())
            return both, both
        return FloatTable(embedding), FloatTable(head.float())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        qk = qkv[:, :heads]
        normed = qk if norm is None else F.rms_norm(qk, qk.shape[-1:], eps=eps).mul_(norm)
        qk.copy_(apply_rope(normed, cos, sin))

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return GATED[activation](*gate_up.chunk(2, -1))

    def decode(self, cache: KVCache, tables: Tensor, positions: Tensor, length: int) -> Attend:
        return DecodeAttention(cache, tables, positions, length)

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        return random_uniform(keys, positions)

    def draw(self, logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, knobs, u)
