"""Numba kernels of causal attention in bfloat16 on a CPU, forward and backward.

The queries of a head are taken LANES at a time. Their logits and probabilities lie as [keys, LANES], so that
each step of a softmax is one vector operation for all of them, and all else is products of small matrices.
Sums, softmax and gradients are float32. Blocks are padded with zeros, which add nothing.

Notation: as in pointwise.py.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.kernels.cpu_math import dot, inlined_exp, nearest_bf16, of_bf16
from areal_q.kernels.cpu_tile import LANES
from areal_q.kernels.jit import SUMS, kernel
from areal_q.kernels.training.pointwise import B3, F2, F3, I1, I2
from areal_q.kernels.training.product import ROWS, add_product

float32 = np.float32


@kernel(inline="always")
def _whole(count, block):
    """Returns the smallest multiple of `block` that is at least `count`."""
    return (count + block - 1) // block * block


@kernel()
def _gather(x, rows, head, out):
    """Writes `head` of x [T, H, dim] at `rows` into the first rows of `out`, and zeros around it."""
    for j in range(rows.shape[0]):
        given, row = x[rows[j], head], out[j]
        for i in range(given.shape[0]):
            row[i] = of_bf16(given[i])
        row[given.shape[0] :] = float32(0.0)
    out[rows.shape[0] :] = float32(0.0)


@kernel()
def _add_rows(x, rows, head, factor, out):
    """Adds the first rows of x, times `factor`, to `head` of out [T, H, dim] at `rows`."""
    for j in range(rows.shape[0]):
        row, total = x[j], out[rows[j], head]
        for i in range(total.shape[0]):
            total[i] += row[i] * factor


@kernel()
def _transpose(x, factor, out):
    for j in range(x.shape[0]):
        row, column = x[j], out[:, j]
        for i in range(row.shape[0]):
            column[i] = row[i] * factor


@kernel()
def _mask(logits, start):
    """Sets the logits of keys after a query to −∞; the first query is at `start`."""
    for j in range(start + 1, logits.shape[0]):
        logits[j, : j - start] = float32(-np.inf)


@kernel(fastmath=SUMS)
def _softmax(w, lse):
    """Turns the columns of w [keys, LANES] into their softmax, and `lse` [LANES] into the logs of the sums of
    their exponentials."""
    top, total = w[0].copy(), np.zeros(LANES, float32)
    for j in range(1, w.shape[0]):
        row = w[j]
        for i in range(LANES):
            top[i] = row[i] if row[i] > top[i] else top[i]
    for j in range(w.shape[0]):
        row = w[j]
        for i in range(LANES):
            row[i] = inlined_exp(row[i] - top[i])
            total[i] += row[i]
    for i in range(LANES):
        lse[i] = top[i] + np.log(total[i])
        total[i] = float32(1.0) / total[i]
    for j in range(w.shape[0]):
        row = w[j]
        for i in range(LANES):
            row[i] *= total[i]


@kernel(fastmath=SUMS)
def _softmax_backward(p, ds, lse, along):
    """Turns logits into probabilities p [keys, LANES], and ds, their gradient, into that of the logits:
    p · (ds − along), where along [LANES] is Σ p · ds."""
    for j in range(p.shape[0]):
        probabilities, slopes = p[j], ds[j]
        for i in range(LANES):
            probabilities[i] = inlined_exp(probabilities[i] - lse[i])
            slopes[i] = probabilities[i] * (slopes[i] - along[i])


@kernel(void(B3, nt.int64, nt.int64, I2, I1, I1, nt.float32, B3, F2), fastmath=SUMS)
def attend(qkv, heads, kv_heads, rows, begins, ends, scale, out, lse):
    """Computes causal attention within each sequence. `rows` [S, L] are its tokens' places in qkv [T, H, dim],
    and its columns from begins[s] to before ends[s] are computed. out is [T, heads, dim], lse [T, heads]."""
    longest, dim, group = _whole(rows.shape[1], LANES), qkv.shape[2], heads // kv_heads
    width = _whole(dim, LANES)
    k, v = np.empty((longest, width), float32), np.empty((longest, width), float32)
    q, q_t = np.empty((LANES, width), float32), np.empty((width, LANES), float32)
    w, mixed = np.empty((longest, LANES), float32), np.empty((LANES, width), float32)
    sums = np.empty(LANES, float32)
    for s in range(rows.shape[0]):
        places = rows[s, : ends[s]]
        for kv in range(kv_heads if ends[s] > begins[s] else 0):
            keys = _whole(ends[s], ROWS)
            _gather(qkv, places, heads + kv, k[:keys])
            _gather(qkv, places, heads + kv_heads + kv, v[:keys])
            for h in range(kv * group, (kv + 1) * group):
                for start in range(begins[s], ends[s], LANES):
                    own = places[start : start + LANES]
                    keys = _whole(start + own.shape[0], ROWS)
                    _gather(qkv, own, h, q)
                    _transpose(q, scale, q_t)
                    w[:keys] = float32(0.0)
                    add_product(k[:keys], q_t, w[:keys])
                    _mask(w[:keys], start)
                    _softmax(w[:keys], sums)
                    mixed[:] = float32(0.0)
                    add_product(w[:keys].T, v[:keys], mixed)
                    for i in range(own.shape[0]):
                        lse[own[i], h] = sums[i]
                        row, written = mixed[i], out[own[i], h]
                        for c in range(dim):
                            written[c] = nearest_bf16(row[c])


@kernel(void(B3, B3, B3, F2, nt.int64, nt.int64, I2, I1, I1, nt.float32, F3), fastmath=SUMS)
def attend_backward(grad, qkv, out, lse, heads, kv_heads, rows, begins, ends, scale, grad_qkv):
    """Adds the gradient of qkv to `grad_qkv` [T, H, dim], from `grad` of `attend`'s output."""
    longest, dim, group = _whole(rows.shape[1], LANES), qkv.shape[2], heads // kv_heads
    width, one = _whole(dim, LANES), float32(1.0)
    k, v = np.empty((longest, width), float32), np.empty((longest, width), float32)
    dk, dv = np.empty((longest, width), float32), np.empty((longest, width), float32)
    q, q_t = np.empty((LANES, width), float32), np.empty((width, LANES), float32)
    d, d_t = np.empty((LANES, width), float32), np.empty((width, LANES), float32)
    p, ds = np.empty((longest, LANES), float32), np.empty((longest, LANES), float32)
    mixed, dq = np.empty((LANES, width), float32), np.empty((LANES, width), float32)
    along, sums = np.empty(LANES, float32), np.empty(LANES, float32)
    for s in range(rows.shape[0]):
        places = rows[s, : ends[s]]
        for kv in range(kv_heads if ends[s] > begins[s] else 0):
            keys = _whole(ends[s], ROWS)
            _gather(qkv, places, heads + kv, k[:keys])
            _gather(qkv, places, heads + kv_heads + kv, v[:keys])
            dk[:keys] = float32(0.0)
            dv[:keys] = float32(0.0)
            for h in range(kv * group, (kv + 1) * group):
                for start in range(begins[s], ends[s], LANES):
                    own = places[start : start + LANES]
                    keys = _whole(start + own.shape[0], ROWS)
                    _gather(qkv, own, h, q)
                    _gather(grad, own, h, d)
                    _gather(out, own, h, mixed)
                    _transpose(q, scale, q_t)
                    _transpose(d, one, d_t)
                    for i in range(LANES):
                        along[i] = dot(d[i], mixed[i])
                        sums[i] = lse[own[i], h] if i < own.shape[0] else float32(0.0)
                    p[:keys] = float32(0.0)
                    ds[:keys] = float32(0.0)
                    add_product(k[:keys], q_t, p[:keys])
                    add_product(v[:keys], d_t, ds[:keys])
                    _mask(p[:keys], start)
                    _softmax_backward(p[:keys], ds[:keys], sums, along)
                    dq[:] = float32(0.0)
                    add_product(ds[:keys].T, k[:keys], dq)
                    add_product(p[:keys], d, dv[:keys])
                    add_product(ds[:keys], q, dk[:keys])
                    _add_rows(dq, own, h, scale, grad_qkv)
            _add_rows(dk, places, heads + kv, scale, grad_qkv)
            _add_rows(dv, places, heads + kv_heads + kv, one, grad_qkv)
