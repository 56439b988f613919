"""Attention of one query on a CPU, to keys and to values that lie row by row."""

from areal_q.kernels.cpu_math import dot
from areal_q.kernels.jit import SUMS, kernel


@kernel(fastmath=SUMS)
def dots(rows, x, count, out):
    """Writes x [G, D] · rows [N, D]ᵀ into out [G, N], float32 and C contiguous, for the first `count` of N."""
    for r in range(count):
        for g in range(out.shape[0]):
            out[g, r] = dot(rows[r], x[g])


@kernel(fastmath=SUMS)
def weighted_sums(weights, rows, count, out):
    """Adds weights [G, N] · rows [N, D] to out [G, D], all float32 and C contiguous: of the first `count` of N,
    four at a time, since each time the sums are read and written again."""
    whole = count // 4 * 4
    for g in range(out.shape[0]):
        w, total = weights[g], out[g]
        for r in range(0, whole, 4):
            a, b, c, d = rows[r], rows[r + 1], rows[r + 2], rows[r + 3]
            for i in range(total.shape[0]):
                total[i] += w[r] * a[i] + w[r + 1] * b[i] + w[r + 2] * c[i] + w[r + 3] * d[i]
        for r in range(whole, count):
            for i in range(total.shape[0]):
                total[i] += w[r] * rows[r, i]
