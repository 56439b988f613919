"""Numba kernels for decoding on a CPU: each is one loop in place of a chain of torch operations.

At the sizes of a decoding step the cost of a torch operation is mostly its dispatch, 2 to 10 μs, and a step of
a small model is some 200 operations around a dozen GEMMs. Each function here does the work of several of them
in one pass over rows that stay in the processor's cache. Its results are those of torch: int8 codes
and scales to the bit, all else to float32 rounding, as tests/engines/test_ops.py has it.
NaN and infinity reach the log-prob as they do in torch.

LLVM compiles the kernels when this module is first imported, which takes seconds and no C compiler. They are
then read from disk (areal_q/kernels/jit.py). Arrays are C contiguous. Notation: T tokens or rows, K
channels, V vocabulary.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.kernels.cpu_math import dot, exp
from areal_q.kernels.cpu_rows import dots, weighted_sums
from areal_q.kernels.jit import FMA, MAGNITUDE, SUMS, kernel

float32, int32, uint32 = np.float32, np.int32, np.uint32
_BLOCK = 256
"""Tokens of the vocabulary of which the largest logit and the sum of probabilities are kept"""
_MOSTLY_ENOUGH = 8.0
"""Nats below the largest logit at which top-p is first looked for"""
_BINS = 1024
"""Classes of logits in one of which the least one that can be drawn is looked for"""
F1, F2, F3, F4 = (nt.Array(nt.float32, n, "C") for n in (1, 2, 3, 4))
I1, I2, D1 = nt.Array(nt.int64, 1, "C"), nt.Array(nt.int64, 2, "C"), nt.Array(nt.float64, 1, "C")


@kernel(void(F2, F1, nt.float32, F2), fastmath=SUMS)
def rms_norm(x, weight, eps, y):
    for t in range(x.shape[0]):
        r = float32(1.0) / np.sqrt(dot(x[t], x[t]) / float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            y[t, i] = x[t, i] * r * weight[i]


@kernel(void(F3, nt.int64, nt.boolean, F2, nt.float32, F2, F2), fastmath=SUMS)
def rotate(qkv, heads, norm, weights, eps, cos, sin):
    """Applies RoPE in place to the first `heads` heads of qkv [T, H, dim], and in them to as many channels as
    cos and sin have, after an RMSNorm of each head if `norm` is True."""
    half = cos.shape[1] // 2
    for t in range(qkv.shape[0]):
        for h in range(heads):
            x = qkv[t, h]
            if norm:
                r = float32(1.0) / np.sqrt(dot(x, x) / float32(x.shape[0]) + eps)
                for i in range(x.shape[0]):
                    x[i] = x[i] * r * weights[h, i]
            first, second = x[:half], x[half : 2 * half]
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


@kernel(void(F2, F2), fastmath=FMA)
def geglu(gate_up, y):
    """Computes y = gelu(gate) · up, [T, M], from gate_up [T, 2 M], by GELU's tanh form: with
    z = √(2/π) · (x + 0.044715 x³), x · (1 + tanh z) / 2 = x / (1 + exp(-2 z))."""
    mlp = y.shape[1]
    for t in range(y.shape[0]):
        gate, up = gate_up[t, :mlp], gate_up[t, mlp:]
        for i in range(mlp):
            x = gate[i]
            z = float32(-1.5957691216057308) * x * (float32(1.0) + float32(0.044715) * x * x)
            y[t, i] = x / (float32(1.0) + exp(z)) * up[i]


@kernel(void(F2, F2), fastmath=FMA)
def clamped_swiglu(gate_up, y):
    """Computes gpt-oss' y = (up + 1) · gate · σ(1.702 · gate), [T, M], from gate_up [T, 2 M], where `gate` is 7
    at most and `up` within ±7."""
    mlp, limit = y.shape[1], float32(7.0)
    for t in range(y.shape[0]):
        gate, up = gate_up[t, :mlp], gate_up[t, mlp:]
        for i in range(mlp):
            g, u = gate[i], up[i]
            g = limit if g > limit else g
            u = limit if u > limit else -limit if u < -limit else u
            y[t, i] = (u + float32(1.0)) * (g / (float32(1.0) + exp(float32(-1.702) * g)))


@kernel()
def _largest(bits):
    """Returns the largest of the floats with these bits, NaN above all. Ordered as whole numbers they take LLVM
    fewer steps, since it may not reorder comparisons with NaN."""
    top = int32(-(2**31))
    for i in range(bits.shape[0]):
        top = max(top, int32(bits[i] ^ ((bits[i] >> int32(31)) & MAGNITUDE)))
    return int32(top ^ ((top >> int32(31)) & MAGNITUDE)).view(float32)


@kernel(fastmath=SUMS)
def _softmax(w, first, length, scale, sinks):
    """Turns the scores w [G, ≥ length] of positions `first` … length - 1, times `scale`, into their softmax,
    for each of G queries; `sinks` [G], which take a share, are scores of no position, or None."""
    for g in range(w.shape[0]):
        row = w[g, first:length]
        top, total = _largest(row.view(int32)) * scale, float32(0.0)
        if sinks is not None:
            top = sinks[g] if sinks[g] > top else top
        for i in range(len(row)):
            row[i] = exp(row[i] * scale - top)
            total += row[i]
        if sinks is not None:
            total += exp(sinks[g] - top)
        share = float32(1.0) / total
        for i in range(len(row)):
            row[i] *= share


@kernel(
    [void(F3, F4, F4, I2, I1, nt.int64, nt.float32, sinks, F3) for sinks in (nt.none, F1)],
    fastmath=SUMS,
)
def decode_attention(qkv, keys, values, tables, positions, window, scale, sinks, out):
    """Writes the new keys and values of qkv [R, heads + 2 · kv_heads, dim] into the cache [kv_heads, pages,
    PAGE, dim], and computes the attention of each row r, whose pages are tables[r], to its last `window`
    positions up to positions[r]. `sinks` [heads] are scores of no position, or None."""
    kv_heads, page, heads, dim = keys.shape[0], keys.shape[2], out.shape[1], out.shape[2]
    group = heads // kv_heads
    w = np.empty((group, tables.shape[1] * page), float32)
    out[:] = float32(0.0)
    for r in range(qkv.shape[0]):
        length, last = positions[r] + 1, positions[r] // page
        first = max(length - window, 0)
        for h in range(kv_heads):
            at = positions[r] % page
            k, v = keys[h, tables[r, last], at], values[h, tables[r, last], at]
            for i in range(dim):
                k[i] = qkv[r, heads + h, i]
                v[i] = qkv[r, heads + kv_heads + h, i]
            mine = slice(h * group, (h + 1) * group)
            for p in range(first // page, last + 1):
                begin, end = max(first, p * page), min(length, (p + 1) * page)
                dots(keys[h, tables[r, p], begin - p * page :], qkv[r, mine], w, begin, end)
            _softmax(w, first, length, scale, None if sinks is None else sinks[mine])
            for p in range(first // page, last + 1):
                begin, end = max(first, p * page), min(length, (p + 1) * page)
                weighted_sums(
                    w, begin, end, values[h, tables[r, p], begin - p * page :], out[r, mine]
                )


@kernel()
def _maxima(row, maxima):
    """Writes the largest number of each block of row [V], and returns the largest of all. NaN is above all."""
    for b in range(len(maxima)):
        maxima[b] = _largest(row[b * _BLOCK : (b + 1) * _BLOCK].view(int32))
    return _largest(maxima.view(int32))


@kernel(fastmath=FMA)
def _shares_from(bound, part, top, scale, shares):
    for i in range(len(part)):
        share = exp((part[i] - top) * scale)
        shares[i] = share if part[i] >= bound else float32(0.0)


@kernel()
def _shares(row, b, top, scale, kept, shares):
    """Writes the probabilities of block b of row [V], in units of the largest one; 0 for a token that is not
    kept. Returns their number. With kept = (bound, last), a token is kept if its logit is above `bound`, or is
    `bound` while its id is at most `last`."""
    bound, last = kept
    part = row[b * _BLOCK : (b + 1) * _BLOCK]
    ties = min(max(last + 1 - b * _BLOCK, 0), len(part))
    _shares_from(bound, part[:ties], top, scale, shares[:ties])
    _shares_from(np.nextafter(bound, float32(np.inf)), part[ties:], top, scale, shares[ties:])
    return len(part)


@kernel(fastmath=SUMS)
def _sum(x):
    total = 0.0
    for i in range(len(x)):
        total += np.float64(x[i])
    return total


@kernel()
def _running_sums(row, maxima, top, scale, kept, shares, sums):
    """Writes the sum of the probabilities of the first 1, 2, … blocks, and returns that of all."""
    total = 0.0
    for b in range(len(maxima)):
        if maxima[b] >= kept[0]:
            count = _shares(row, b, top, scale, kept, shares)
            total += _sum(shares[:count])
        sums[b] = total
    return total


@kernel()
def _candidates(row, maxima, low, kept, ids, values):
    """Writes the ids and logits of the kept tokens whose logits are at least `low`. Returns their number."""
    found, (bound, last) = 0, kept
    for b in range(len(maxima)):
        if maxima[b] >= low:
            for i in range(b * _BLOCK, min((b + 1) * _BLOCK, len(row))):
                x = row[i]
                if x >= low and (x > bound or (x == bound and i <= last)):
                    ids[found], values[found] = i, x
                    found += 1
    return found


@kernel()
def _bins(values, top, per_bin, bins):
    for i in range(len(values)):
        bins[i] = uint32(min((top - values[i]) * per_bin, float32(_BINS - 1)))


@kernel()
def _fewest(ids, values, weights, bins, top, target):
    """Returns (bound, last) of the fewest largest of the tokens `ids`, which have these logits, whose weights
    add up to at least `target`, or of all. The smaller id is first among equals.

    Nothing is sorted but the tokens of one of many bins of logits, that in which the sum comes to the target.
    """
    sums, total, above, crossed = np.zeros(_BINS), 0.0, 0.0, 0
    spread = max(top - np.min(values), float32(1e-30))
    _bins(values, top, float32(_BINS) / spread, bins)
    for i in range(len(ids)):
        sums[bins[i]] += np.float64(weights[i])
    for b in range(_BINS):
        total += sums[b]
    target = min(target, total)
    while above + sums[crossed] < target:
        above += sums[crossed]
        crossed += 1
    there = np.flatnonzero(bins == crossed)
    order, n = np.argsort(-values[there], kind="mergesort"), 0
    while n < len(there) and above < target:
        above += np.float64(weights[there[order[n]]])
        n += 1
    last = there[order[n - 1]]
    return values[last], np.int64(ids[last])


@kernel()
def _kept(row, maxima, top, scale, top_k, top_p, min_p, shares, sums, scratch):
    """Returns (bound, last) of the tokens that can be drawn."""
    vocab, kept, n = len(row), (float32(-np.inf), np.int64(len(row))), 0
    ids, values, weights, bins = scratch
    if 0 < top_k < vocab:
        # As many blocks have a token that is no smaller; more blocks than there are may have enough.
        low = np.sort(maxima)[-min(top_k, len(maxima))]
        for least in (max(low, float32(-1e30)), float32(-1e30)):
            n = _candidates(row, maxima, least, kept, ids, values)
            if n >= top_k:
                break
        weights[:n] = float32(1.0)
        kept = _fewest(ids[:n], values[:n], weights[:n], bins[:n], top, np.float64(top_k))
    if top_p < 1:
        target = top_p * _running_sums(row, maxima, top, scale, kept, shares, sums)
        # All tokens below the second `low` together have less than 1 - top_p of the largest one's probability.
        for nats in (_MOSTLY_ENOUGH, np.log(vocab / (1 - np.float64(top_p)))):
            low = max(top - float32(nats) / scale, float32(-1e30))
            n = _candidates(row, maxima, low, kept, ids, values)
            _shares_from(low, values[:n], top, scale, weights)
            if _sum(weights[:n]) >= target:
                break
        kept = _fewest(ids[:n], values[:n], weights[:n], bins[:n], top, target)
    if min_p > 0:
        bound = float32(top + np.log(np.float64(min_p)) / scale)
        if bound > kept[0]:
            kept = bound, np.int64(vocab)
    return kept


@kernel(void(F2, F1, I1, F1, F1, D1, I1, F1), fastmath=FMA)
def draw(logits, temperature, top_k, top_p, min_p, u, tokens, logprobs):
    """Draws by inverse CDF at u [R] from the rows of logits [R, V], as sampling.draw does."""
    blocks = (logits.shape[1] + _BLOCK - 1) // _BLOCK
    maxima, sums, shares = np.empty(blocks, float32), np.empty(blocks), np.empty(_BLOCK, float32)
    vocab = logits.shape[1]
    ids, values, weights = (
        np.empty(vocab, int32),
        np.empty(vocab, float32),
        np.empty(vocab, float32),
    )
    scratch = ids, values, weights, np.empty(vocab, uint32)
    for r in range(len(logits)):
        row, greedy = logits[r], temperature[r] == 0
        top = _maxima(row, maxima)
        if not np.isfinite(top):
            tokens[r], logprobs[r] = 0, np.nan
            continue
        divisor = float32(1.0) if greedy else temperature[r]
        scale = min(float32(1.0) / divisor, float32(1e38))
        if greedy:
            kept = _kept(
                row, maxima, top, scale, 1, float32(1.0), float32(0.0), shares, sums, scratch
            )
        else:
            kept = _kept(
                row, maxima, top, scale, top_k[r], top_p[r], min_p[r], shares, sums, scratch
            )
        total = _running_sums(row, maxima, top, scale, kept, shares, sums)
        target, b = u[r] * total, 0
        while b < blocks - 1 and sums[b] <= target:
            b += 1
        below, token = sums[b - 1] if b else 0.0, 0
        for i in range(_shares(row, b, top, scale, kept, shares)):
            if shares[i] > 0:
                token = b * _BLOCK + i
                below += shares[i]
                if below > target:
                    break
        tokens[r] = token
        logprobs[r] = np.float64(row[token] - top) / divisor - np.log(total)


@kernel(void(I1, I1, D1))
def uniform(keys, positions, u):
    """Computes the same as sampling.random_uniform: 53 bits of splitmix64 of (key, position)."""
    for t in range(keys.shape[0]):
        z = np.uint64(keys[t]) + np.uint64(positions[t]) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
        u[t] = np.float64(z >> np.uint64(11)) * 2.0**-53
