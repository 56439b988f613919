"""Numba kernels of a decoder that computes in bfloat16 on a CPU: each is one pass over memory in place of a
chain of torch operations.

numba has no bfloat16, so arrays of it are uint16 here, the upper half of a float32. All arithmetic is float32,
and what is stored in bfloat16 is rounded once, half to even, as torch rounds. Arrays are C contiguous. LLVM
compiles the kernels when this module is first imported, which takes seconds, and then reads them from disk.
`rotate` and `swiglu` stand in areal_q/kernels/decoding.py too, where numbers are float32 and nothing is kept
for a backward pass.

Notation: T tokens, D channels, H heads of q, k and v together, S sequences of at most L tokens, M width of the
MLP, B columns of a block of logits.
"""

import numpy as np
from numba import types as nt
from numba import void

from areal_q.kernels.cpu_math import dot, inlined_exp, nearest_bf16, of_bf16
from areal_q.kernels.jit import FMA, SUMS, kernel

float32, uint16 = np.float32, np.uint16
F1, F2, F3 = (nt.Array(nt.float32, n, "C") for n in (1, 2, 3))
B2, B3 = (nt.Array(nt.uint16, n, "C") for n in (2, 3))
I1, I2 = (nt.Array(nt.int64, n, "C") for n in (1, 2))


@kernel(void(F2, B2, F1, nt.float32, F2, B2, F1), fastmath=SUMS)
def add_norm(x, delta, weight, eps, total, y, scale):
    """Computes total = x + delta and its RMSNorm y, and the factor `scale` [T] of each row. A `delta` of no
    rows is 0."""
    channels = x.shape[1]
    for t in range(x.shape[0]):
        row = total[t]
        for i in range(channels):
            row[i] = x[t, i]
        if delta.shape[0]:
            for i in range(channels):
                row[i] += of_bf16(delta[t, i])
        r = float32(1.0) / np.sqrt(dot(row, row) / float32(channels) + eps)
        scale[t] = r
        for i in range(channels):
            y[t, i] = nearest_bf16(row[i] * r * weight[i])


@kernel(void(F2, B2, F2, F1, F1, F2, B2, F1), fastmath=SUMS)
def add_norm_backward(onward, grad, total, scale, weight, grad_x, grad_delta, grad_weight):
    """Computes the gradient of x, the same rounded to bfloat16 for delta unless that has no rows, and adds that
    of the weight to `grad_weight`. `grad` is that of y, and `onward` that of total, 0 if it has no rows."""
    channels = total.shape[1]
    g = np.empty(channels, float32)
    for t in range(total.shape[0]):
        r = scale[t]
        for i in range(channels):
            own = of_bf16(grad[t, i])
            grad_weight[i] += own * total[t, i] * r
            g[i] = own * weight[i]
        along = dot(g, total[t]) * r * r / float32(channels)
        out = grad_x[t]
        for i in range(channels):
            out[i] = r * (g[i] - total[t, i] * along)
        if onward.shape[0]:
            for i in range(channels):
                out[i] += onward[t, i]
        if grad_delta.shape[0]:
            for i in range(channels):
                grad_delta[t, i] = nearest_bf16(out[i])


@kernel(void(B3, nt.int64, F2, nt.float32, F2, F2, B3, F2), fastmath=SUMS)
def rotate(qkv, turned, norms, eps, cos, sin, out, scale):
    """Applies RoPE to the first `turned` heads of qkv [T, H, dim], after an RMSNorm of each if `norms` has
    rows, one for each of these heads, and copies the others. `scale` [T, turned] are the norms' factors."""
    half = qkv.shape[2] // 2
    x = np.empty(qkv.shape[2], float32)
    for t in range(qkv.shape[0]):
        for h in range(qkv.shape[1]):
            if h >= turned:
                for i in range(2 * half):
                    out[t, h, i] = qkv[t, h, i]
                continue
            for i in range(2 * half):
                x[i] = of_bf16(qkv[t, h, i])
            if norms.shape[0]:
                r = float32(1.0) / np.sqrt(dot(x, x) / float32(2 * half) + eps)
                scale[t, h] = r
                for i in range(2 * half):
                    x[i] = x[i] * r * norms[h, i]
            for i in range(half):
                out[t, h, i] = nearest_bf16(x[i] * cos[t, i] - x[half + i] * sin[t, i])
                out[t, h, half + i] = nearest_bf16(x[half + i] * cos[t, i] + x[i] * sin[t, i])


@kernel(void(B3, B3, nt.int64, F2, F2, F2, F2, B3, F2), fastmath=SUMS)
def rotate_backward(grad, qkv, turned, norms, scale, cos, sin, out, grad_norms):
    """Computes the gradient of qkv from that of `rotate`'s output, and adds that of norms to `grad_norms`."""
    half = grad.shape[2] // 2
    g, x = np.empty(2 * half, float32), np.empty(2 * half, float32)
    for t in range(grad.shape[0]):
        for h in range(grad.shape[1]):
            if h >= turned:
                for i in range(2 * half):
                    out[t, h, i] = grad[t, h, i]
                continue
            for i in range(half):
                first, second = of_bf16(grad[t, h, i]), of_bf16(grad[t, h, half + i])
                g[i] = first * cos[t, i] + second * sin[t, i]
                g[half + i] = second * cos[t, i] - first * sin[t, i]
            if norms.shape[0]:
                r = scale[t, h]
                for i in range(2 * half):
                    x[i] = of_bf16(qkv[t, h, i])
                    grad_norms[h, i] += g[i] * x[i] * r
                    g[i] *= norms[h, i]
                along = dot(g, x) * r * r / float32(2 * half)
                for i in range(2 * half):
                    g[i] = r * (g[i] - x[i] * along)
            for i in range(2 * half):
                out[t, h, i] = nearest_bf16(g[i])


@kernel(void(B2, B2), fastmath=FMA)
def swiglu(gate_up, y):
    """Computes y = silu(gate) · up, [T, M], from gate_up [T, 2 M]."""
    width = y.shape[1]
    for t in range(y.shape[0]):
        gate, up, out = gate_up[t, :width], gate_up[t, width:], y[t]
        for i in range(width):
            g = of_bf16(gate[i])
            out[i] = nearest_bf16(g / (float32(1.0) + inlined_exp(-g)) * of_bf16(up[i]))


@kernel(void(B2, B2, B2, B2), fastmath=FMA)
def swiglu_backward(grad, gate_up, grad_gate_up, y):
    """Computes the gradient of gate_up from that of y, and y again."""
    width = y.shape[1]
    for t in range(y.shape[0]):
        gate, up, out = gate_up[t, :width], gate_up[t, width:], y[t]
        to_gate, to_up, given = grad_gate_up[t, :width], grad_gate_up[t, width:], grad[t]
        for i in range(width):
            g, u, d = of_bf16(gate[i]), of_bf16(up[i]), of_bf16(given[i])
            s = float32(1.0) / (float32(1.0) + inlined_exp(-g))
            silu = g * s
            out[i] = nearest_bf16(silu * u)
            to_up[i] = nearest_bf16(d * silu)
            to_gate[i] = nearest_bf16(d * u * (s + silu * (float32(1.0) - s)))


@kernel(void(F2, nt.int64, nt.float32, I1, F1, F1, F1, F1, I1, B2), fastmath=SUMS)
def softmax_sums(logits, start, scale, targets, chosen, largest, total, weighted, top, kept):
    """Goes on with the sums of a softmax over columns start … start + B of l = logits · scale, [T, B]: the
    largest l and its column `top`, Σ exp(l - largest) and Σ exp(l - largest) · (l - largest), each [T], and l
    of the target, if it is among them. `logits` become exp(l - largest), and so does `kept` if it has rows, but
    0 for the target."""
    for t in range(logits.shape[0]):
        row, columns = logits[t], logits.shape[1]
        if start <= targets[t] < start + columns:
            chosen[t] = row[targets[t] - start] * scale
        most = row[0]
        for j in range(columns):
            most = max(most, row[j])
        above = max(largest[t], most * scale)
        if above > largest[t] or start == 0:
            for j in range(columns):
                if row[j] == most:
                    top[t] = start + j
                    break
            grown = above - largest[t] if start > 0 else float32(0.0)
            weighted[t] = (weighted[t] - grown * total[t]) * np.exp(-grown)
            total[t] *= np.exp(-grown)
            largest[t] = above
        exps = float32(0.0)
        sums = float32(0.0)
        for j in range(columns):
            x = row[j] * scale - above
            row[j] = inlined_exp(x)
            exps += row[j]
            sums += row[j] * x
        total[t] += exps
        weighted[t] += sums
        if kept.shape[0]:
            out = kept[t]
            for j in range(columns):
                out[j] = nearest_bf16(row[j])
            if start <= targets[t] < start + columns:
                out[targets[t] - start] = uint16(0)


@kernel(void(B2, nt.int64, nt.float32, I2, F2, F2, B2), fastmath=FMA)
def softmax_gradient(logits, start, scale, places, exact, slopes, grad):
    """Computes the gradient of logits [T, B] from columns start … start + B of a softmax, but 0 for the target.

    `places` [T, 2] are the columns of the target and of the largest logit, `exact` [T, 4] their l, lse and
    entropy, and `slopes` [T, 3] the gradients of the target's l, of lse and of the entropy. The given logits
    are rounded, which could turn the gradient around where one column has nearly all probability; hence l.
    """
    for t in range(logits.shape[0]):
        row, out = logits[t], grad[t]
        lse, entropy = exact[t, 2], exact[t, 3]
        of_lse, of_entropy = slopes[t, 1] * scale, slopes[t, 2] * scale
        for j in range(row.shape[0]):
            x = of_bf16(row[j]) * scale - lse
            out[j] = nearest_bf16(inlined_exp(x) * (of_lse - of_entropy * (x + entropy)))
        top, target = places[t, 1] - start, places[t, 0] - start
        if 0 <= top < row.shape[0]:
            x = exact[t, 1] - lse
            out[top] = nearest_bf16(inlined_exp(x) * (of_lse - of_entropy * (x + entropy)))
        if 0 <= target < row.shape[0]:
            out[target] = uint16(0)
