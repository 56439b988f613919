r"""The operations of TorchOps, faster on a CPU: each is one loop of areal_q/kernels/decoding.py.

This module passes tensors as arrays, without a copy, and allocates the results; that file does the
arithmetic. The loops run on one thread, whatever `rollout.threads` is. The GEMMs are torch's and use all
threads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal_q.config.engines import Dtype
from areal_q.kernels import decoding
from areal_q.kernels.cpu_tile import has_bf16
from areal_q.linear.bf16_weight import bf16_weight
from areal_q.linear.cpu_linear import Bf16Table, bf16_linear, cpu_linear
from areal_q.linear.eight_bit_linear import eight_bit_linear
from areal_q.linear.four_bit_linear import four_bit_linear
from areal_q.linear.quantized_linear import Linear
from areal_q.linear.registry import linear_of
from areal_q.models.config import Activation
from areal_q.quant.format import Format, Parts
from areal_q.quant.formats.int8 import Int8
from rollout.engines.reference.kv_cache import Attend, DecodeAttention, KVCache
from rollout.engines.reference.kv_cache_fp8 import Fp8KVCache
from rollout.engines.reference.ops import FloatTable, Table, TorchOps
from rollout.engines.reference.sampling import Knobs

GATED = {
    "silu": decoding.swiglu,
    "gelu_tanh": decoding.geglu,
    "clamped_silu": decoding.clamped_swiglu,
}


class FusedDecodeAttention:
    """The attention of kv_cache.DecodeAttention in one loop. It needs no mask, since each row reads only its
    own positions."""

    def __init__(self, cache: KVCache, tables: Tensor, positions: Tensor) -> None:
        self.layers, self.tables, self.positions = cache.layers, tables.numpy(), positions.numpy()
        self.config, self.scale = cache.config, cache.config.attention_scale

    def __call__(self, layer: int, qkv: Tensor, sinks: Tensor | None) -> Tensor:
        out = np.empty((len(qkv), self.config.heads, qkv.shape[-1]), np.float32)
        keys, values = self.layers[layer].numpy()
        window = self.config.window_of(layer) or self.config.max_positions
        at, own = (self.tables, self.positions), None if sinks is None else sinks.numpy()
        decoding.decode_attention(qkv.numpy(), keys, values, *at, window, self.scale, own, out)
        return torch.from_numpy(out).view(len(qkv), -1)


class FusedOps:
    def __init__(self, dtype: Dtype = "float32") -> None:
        if dtype == "auto":
            dtype = "bfloat16x2" if has_bf16() else "float32"
        self.int8 = dtype == "int8"
        """True if weights of four bits are multiplied with int8 activations"""
        if self.int8:
            dtype = "bfloat16" if has_bf16() else "float32"
        self.parts = {"float32": 0, "bfloat16": 1, "bfloat16x2": 2}[dtype]
        """Number of bfloat16 parts of other activations; 0: float32"""

    def linear(self, format: Format, parts: Sequence[Parts]) -> Linear:
        if self.int8 and (found := four_bit_linear(format, parts)):
            return found
        if self.parts and not isinstance(format, Int8):
            return bf16_linear(bf16_weight(format, parts), self.parts)
        return eight_bit_linear(format, parts, cpu_linear(linear_of(format, parts)))

    def tables(self, embedding: Tensor, head: Tensor | None) -> tuple[Table, Table]:
        last = embedding if head is None else head
        if not self.parts or (self.parts == 2 and last.dtype != torch.bfloat16):
            return TorchOps().tables(embedding, head)
        packed = Bf16Table(last, self.parts)
        return (packed if head is None else FloatTable(embedding)), packed

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = np.empty(x.shape, np.float32)
        decoding.rms_norm(x.numpy(), weight.numpy(), eps, y)
        return torch.from_numpy(y)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        weights = (
            cos if norm is None else norm
        )  # any array will do without a norm, as it is not read
        decoding.rotate(
            qkv.numpy(), heads, norm is not None, weights.numpy(), eps, cos.numpy(), sin.numpy()
        )

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        y = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        GATED[activation](gate_up.numpy(), y)
        return torch.from_numpy(y)

    def decode(self, cache: KVCache, tables: Tensor, positions: Tensor, length: int) -> Attend:
        if isinstance(cache, Fp8KVCache):
            return DecodeAttention(cache, tables, positions, length)
        return FusedDecodeAttention(cache, tables, positions)

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        u = np.empty(len(keys))
        decoding.uniform(keys.numpy(), positions.numpy(), u)
        return torch.from_numpy(u)

    def draw(self, logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
        tokens, logprobs = np.empty(len(u), np.int64), np.empty(len(u), np.float32)
        settings = [knob.numpy() for knob in knobs[:4]]
        decoding.draw(logits.numpy(), *settings, u.numpy(), tokens, logprobs)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)
