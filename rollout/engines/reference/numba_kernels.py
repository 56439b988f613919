"""Numba kernels for decoding on a CPU: each is one loop in place of a chain of torch operations.

At the sizes of a decoding step the cost of a torch operation is mostly its dispatch, 2 to 10 μs, and a step of
a small model is some 200 operations around a dozen GEMMs. Each function here does the work of several of them
in one pass over rows that stay in the processor's cache. Its results are those of torch (ops.py pairs the two,
and tests/engines/test_ops.py compares them): int8 codes and scales to the bit, all else to float32 rounding.
NaN and infinity reach the log-prob as they do in torch.

LLVM compiles the kernels when this module is first imported, which takes seconds and no C compiler. They are
then read from disk (areal_q/quant/kernels/jit.py). Arrays are C contiguous. Notation: T tokens or rows, K
channels, V vocabulary.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.quant.kernels.cpu_math import dot, exp
from areal_q.quant.kernels.cpu_rows import dots, weighted_sums
from areal_q.quant.kernels.jit import FMA, MAGNITUDE, SUMS, kernel

float32, int32 = np.float32, np.int32
_BLOCK = 512
"""Tokens of the vocabulary after which a running sum is kept"""
F1, F2, F3, F4 = (nt.Array(nt.float32, n, "C") for n in (1, 2, 3, 4))
I1, D1 = nt.Array(nt.int64, 1, "C"), nt.Array(nt.float64, 1, "C")


@kernel(void(F2, F1, nt.float32, F2), fastmath=SUMS)
def rms_norm(x, weight, eps, y):
    for t in range(x.shape[0]):
        r = float32(1.0) / np.sqrt(dot(x[t], x[t]) / float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            y[t, i] = x[t, i] * r * weight[i]


@kernel(void(F3, nt.int64, nt.boolean, F2, nt.float32, F2, F2), fastmath=SUMS)
def rotate(qkv, heads, norm, weights, eps, cos, sin):
    """Applies RoPE in place to the first `heads` heads of qkv [T, H, dim], after an RMSNorm of each head if
    `norm` is True."""
    half = qkv.shape[2] // 2
    for t in range(qkv.shape[0]):
        for h in range(heads):
            x = qkv[t, h]
            if norm:
                r = float32(1.0) / np.sqrt(dot(x, x) / float32(x.shape[0]) + eps)
                for i in range(x.shape[0]):
                    x[i] = x[i] * r * weights[h, i]
            first, second = x[:half], x[half:]
            c1, c2, s1, s2 = cos[t, :half], cos[t, half:], sin[t, :half], sin[t, half:]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * c1[i] - b * s1[i]
                second[i] = b * c2[i] + a * s2[i]


@kernel(void(F2, F2), fastmath=FMA)
def swiglu(gate_up, y):
    mlp = y.shape[1]
    for t in range(y.shape[0]):
        gate, up = gate_up[t, :mlp], gate_up[t, mlp:]
        for i in range(mlp):
            y[t, i] = gate[i] / (float32(1.0) + exp(-gate[i])) * up[i]


@kernel()
def _largest(bits):
    """Returns the largest of the floats with these bits, NaN above all. Ordered as whole numbers they take LLVM
    fewer steps, since it may not reorder comparisons with NaN."""
    top = int32(-(2**31))
    for i in range(bits.shape[0]):
        top = max(top, int32(bits[i] ^ ((bits[i] >> int32(31)) & MAGNITUDE)))
    return int32(top ^ ((top >> int32(31)) & MAGNITUDE)).view(float32)


@kernel(fastmath=SUMS)
def _softmax(w, count, scale):
    """Turns the first `count` numbers of each row of w, times `scale`, into their softmax."""
    for j in range(w.shape[0]):
        row = w[j, :count]
        top, total = _largest(row.view(int32)) * scale, float32(0.0)
        for p in range(count):
            row[p] = exp(row[p] * scale - top)
            total += row[p]
        share = float32(1.0) / total
        for p in range(count):
            row[p] *= share


@kernel(void(F3, F4, F4, I1, nt.float32, F3), fastmath=SUMS)
def decode_attention(qkv, keys, values, positions, scale, out):
    """Writes the new keys and values of qkv [R, heads + 2 · kv_heads, dim] into the cache [slots, kv_heads,
    max_len, dim], and computes the attention of each row r to its own slot, up to positions[r]. The next head's
    keys and values come into the cache meanwhile: the processor itself would look for them after a slot's last
    position."""
    kv_heads, heads, dim = keys.shape[1], out.shape[1], out.shape[2]
    group = heads // kv_heads
    w = np.empty((group, keys.shape[2]), float32)
    for r in range(qkv.shape[0]):
        length = positions[r] + 1
        for h in range(kv_heads):
            k, v = keys[r, h], values[r, h]
            for i in range(dim):
                k[length - 1, i] = qkv[r, heads + h, i]
                v[length - 1, i] = qkv[r, heads + kv_heads + h, i]
            mine = slice(h * group, (h + 1) * group)
            row, head = (r, h + 1) if h + 1 < kv_heads else (min(r + 1, qkv.shape[0] - 1), 0)
            dots(k, qkv[r, mine], length, w, keys[row, head])
            _softmax(w, length, scale)
            weighted_sums(w, v, length, out[r, mine], values[row, head])


@kernel()
def _running_sums(shares, sums):
    """Adds up each row of shares [at most 4, V], one number after the other, and keeps the sums of the first 1,
    2, … blocks of _BLOCK numbers: sums [4, ⌈V / _BLOCK⌉]. An addition waits for the one before it, so that four
    rows at once take as long as one."""
    last = shares.shape[0] - 1
    first, second = shares[0], shares[min(1, last)]
    third, fourth = shares[min(2, last)], shares[last]
    a = b = c = d = 0.0
    for block in range(sums.shape[1]):
        for i in range(block * _BLOCK, min((block + 1) * _BLOCK, shares.shape[1])):
            a += first[i]
            b += second[i]
            c += third[i]
            d += fourth[i]
        sums[0, block], sums[1, block], sums[2, block], sums[3, block] = a, b, c, d


@kernel()
def _first_above(target, shares, sums):
    """Returns the first index whose running sum exceeds `target`, or the last one: of shares [V], whose sums of
    blocks are known."""
    block = 0
    while block < len(sums) - 1 and sums[block] <= target:
        block += 1
    index = block * _BLOCK
    below = (sums[block - 1] if block else 0.0) + shares[index]
    while below <= target and index < len(shares) - 1:
        index += 1
        below += shares[index]
    return index


@kernel(void(F2, nt.float32, D1, I1, F1), fastmath=FMA)
def draw(logits, temperature, u, tokens, logprobs):
    """Draws from softmax(logits / temperature) by inverse CDF at u [R], as sampling.sample_untruncated does."""
    vocab = logits.shape[1]
    shares, tops = np.empty((min(4, logits.shape[0]), vocab), float32), np.empty(4, float32)
    sums = np.empty((4, (vocab + _BLOCK - 1) // _BLOCK))
    for first in range(0, logits.shape[0], 4):
        rows = min(4, logits.shape[0] - first)
        for r in range(rows):
            row, mine = logits[first + r], shares[r]
            top = _largest(row.view(int32))
            for i in range(vocab):
                mine[i] = exp((row[i] - top) / temperature)
            tops[r] = top
        _running_sums(shares[:rows], sums)
        for r in range(rows):
            t, total = first + r, sums[r, -1]
            # The same partial sums as those that made `total`, so one of them exceeds the target.
            tokens[t] = _first_above(u[t] * total, shares[r], sums[r])
            of_token = np.float64(logits[t, tokens[t]] - tops[r])
            logprobs[t] = of_token / temperature - np.log(total)


@kernel(void(I1, I1, D1))
def uniform(keys, positions, u):
    """Computes the same as sampling.random_uniform: 53 bits of splitmix64 of (key, position)."""
    for t in range(keys.shape[0]):
        z = np.uint64(keys[t]) + np.uint64(positions[t]) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        u[t] = np.float64(z >> np.uint64(11)) * 2.0**-53
