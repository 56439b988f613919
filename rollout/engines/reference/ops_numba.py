r"""The operations of TorchOps, faster on a CPU: each is one loop of numba_kernels.py.

This module passes tensors as arrays, without a copy, and allocates the results; numba_kernels.py does the
arithmetic. The loops run on one thread, whatever `rollout.threads` is. The GEMMs are torch's and use all
threads.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.config import Sampling
from areal_q.quant.kernels import cpu_activations
from areal_q.quant.quantized_linear import (
    Fp8GroupLinear,
    Fp8RowLinear,
    Int8Linear,
    Linear,
    int8_matmul,
)
from rollout.engines.reference import numba_kernels
from rollout.engines.reference.kv_cache import Attend, DecodeAttention, KVCache
from rollout.engines.reference.kv_cache_fp8 import Fp8KVCache
from rollout.engines.reference.sampling import sample_untruncated


class FusedInt8Linear:
    """An Int8Linear with the same codes to the bit. The GEMM is torch's, and the steps around it are
    kernels."""

    def __init__(self, linear: Int8Linear) -> None:
        self.codes_t = linear.codes_t
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        codes, x_scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
        cpu_activations.int8_rows(x.numpy(), codes, x_scale)
        sums = int8_matmul(torch.from_numpy(codes), self.codes_t).to(torch.int32).numpy()
        y = np.empty(sums.shape, np.float32)
        added = self.nothing if add is None else add.view(-1, sums.shape[1]).numpy()
        numba_kernels.dequantize(sums, self.scale, x_scale, added, y)
        return torch.from_numpy(y)


class FusedFp8RowLinear:
    """An Fp8RowLinear with the same rounded activations to the bit."""

    def __init__(self, linear: Fp8RowLinear) -> None:
        self.codes = linear.codes
        self.scale = linear.scale.numpy()
        self.nothing = np.zeros((1, len(self.scale)), np.float32)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        numbers, x_scale = np.empty(x.shape, np.float32), np.empty(len(x), np.float32)
        cpu_activations.e4m3_rows(x.numpy(), numbers, x_scale)
        sums = F.linear(torch.from_numpy(numbers), self.codes).numpy()
        y = np.empty(sums.shape, np.float32)
        added = self.nothing if add is None else add.view(-1, sums.shape[1]).numpy()
        numba_kernels.rescale(sums, self.scale, x_scale, added, y)
        return torch.from_numpy(y)


class FusedFp8GroupLinear:
    """An Fp8GroupLinear with the same rounded activations to the bit."""

    def __init__(self, linear: Fp8GroupLinear) -> None:
        self.weight = linear.weight

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        rounded = np.empty(x.shape, np.float32)
        cpu_activations.e4m3_groups(x.numpy(), rounded)
        y = F.linear(torch.from_numpy(rounded), self.weight)
        return y if add is None else y.add_(add)


class FusedDecodeAttention:
    """The attention of kv_cache.DecodeAttention in one loop. It needs no mask, since each row reads only its
    own positions."""

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self.cache, self.positions = cache.data, positions.numpy()
        self.heads, self.scale = cache.config.heads, cache.config.head_dim**-0.5

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        out = np.empty((len(qkv), self.heads, qkv.shape[-1]), np.float32)
        keys, values = self.cache[layer].numpy()
        numba_kernels.decode_attention(qkv.numpy(), keys, values, self.positions, self.scale, out)
        return torch.from_numpy(out).view(len(qkv), -1)


class FusedOps:
    def linear(self, linear: Linear) -> Linear:
        match linear:
            case Int8Linear():
                return FusedInt8Linear(linear)
            case Fp8RowLinear():
                return FusedFp8RowLinear(linear)
            case Fp8GroupLinear():
                return FusedFp8GroupLinear(linear)
            case _:
                return linear

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y = np.empty(x.shape, np.float32)
        numba_kernels.rms_norm(x.numpy(), weight.numpy(), eps, y)
        return torch.from_numpy(y)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        weights = (
            cos if norm is None else norm
        )  # any array will do without a norm, as it is not read
        numba_kernels.rotate(
            qkv.numpy(), heads, norm is not None, weights.numpy(), eps, cos.numpy(), sin.numpy()
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        y = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        numba_kernels.swiglu(gate_up.numpy(), y)
        return torch.from_numpy(y)

    def decode(self, cache: KVCache, positions: Tensor, length: int) -> Attend:
        if isinstance(cache, Fp8KVCache):
            return DecodeAttention(cache, positions, length)
        return FusedDecodeAttention(cache, positions)

    def uniform(self, keys: Tensor, positions: Tensor) -> Tensor:
        u = np.empty(len(keys))
        numba_kernels.uniform(keys.numpy(), positions.numpy(), u)
        return torch.from_numpy(u)

    def draw(self, logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
        if sampling.temperature == 0:
            return sample_untruncated(logits, sampling, u)
        tokens, logprobs = np.empty(len(u), np.int64), np.empty(len(u), np.float32)
        numba_kernels.draw(logits.numpy(), sampling.temperature, u.numpy(), tokens, logprobs)
        return torch.from_numpy(tokens), torch.from_numpy(logprobs)
