"""Attention of one query on a CPU, to keys and to values that lie row by row."""

from areal_q.kernels.cpu_math import dot
from areal_q.kernels.jit import SUMS, kernel


@kernel(fastmath=SUMS)
def dots(rows, x, out, first, last):
    """Writes x [G, D] · rows [N, D]ᵀ into out[:, first:last], float32 and C contiguous, of as many rows."""
    for r in range(last - first):
        for g in range(out.shape[0]):
            out[g, first + r] = dot(rows[r], x[g])


@kernel(fastmath=SUMS)
def weighted_sums(weights, first, last, rows, out):
    """Adds weights[:, first:last] · rows [N, D] to out [G, D], all float32 and C contiguous, of as many rows:
    four at a time, since each time the sums are read and written again."""
    whole = (last - first) // 4 * 4
    for g in range(out.shape[0]):
        w, total = weights[g, first:last], out[g]
        for r in range(0, whole, 4):
            a, b, c, d = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
            for i in range(total.shape[0]):
                total[i] += w[r] * a[i] + w[r + 1] * b[i] + w[r + 2] * c[i] + w[r + 3] * d[i]
        for r in range(whole, last - first):
            for i in range(total.shape[0]):
                total[i] += w[r] * rows[r, i]
