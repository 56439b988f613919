"""Sums by lag class in loops that numba compiles. lag_sums.py has the same in torch, to the same bits.

A loop over a slice that begins at 0 can be vectorized, since then no index is negative.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from areal_q.algorithms.lag_sums import LAGS, LagSums, size_of_asinh
from areal_q.algorithms.reducers import BIN_EDGE, BINS
from areal_q.quant.kernels.jit import kernel

float32, int32 = np.float32, np.int32
WIDTH = float32(2 * BIN_EDGE)
AT_A_TIME = 4


class CompiledLagSums(LagSums):
    """LagSums on a CPU, of float32 log-ratios and at least one token."""

    def __init__(self, bucket: Tensor) -> None:
        super().__init__(bucket)
        ids = bucket.numpy()
        changes = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        self._starts = np.concatenate([[0], changes])
        self._runs_of = (ids[self._starts], np.concatenate([changes, [len(ids)]]))
        """Bucket of each run, int64 [R], and the index behind its last token."""

    def sums(self, columns: Mapping[str, Tensor | None]) -> Tensor:
        sums = {name: np.zeros(LAGS + 1) for name in columns}
        given = {name: column for name, column in columns.items() if column is not None}
        flags = [name for name, column in given.items() if column.dtype == torch.bool]
        for name in flags:
            _count(given[name].view(torch.uint8).numpy(), *self._runs_of, sums[name])
        numbers = [name for name in given if name not in flags]
        for i in range(0, len(numbers), AT_A_TIME):
            names = (numbers[i : i + AT_A_TIME] * AT_A_TIME)[:AT_A_TIME]  # some twice, to be four
            arrays = (_array(given[name]) for name in names)
            sums |= zip(names, _sums_of_four(*arrays, *self._runs_of), strict=True)
        return torch.from_numpy(np.stack(list(sums.values()))[:, :LAGS])

    def maxima(self, columns: Iterable[Tensor]) -> Tensor:
        columns = list(columns)
        out = np.full((len(columns), LAGS + 1), -np.inf)
        for row, column in zip(out, columns, strict=True):
            runs = np.maximum.reduceat(column.numpy(), self._starts)
            np.maximum.at(row, self._runs_of[0], runs)
        return torch.from_numpy(out[:, :LAGS])

    def histograms(self, log_ratios: Iterable[Tensor]) -> Tensor:
        log_ratios = list(log_ratios)
        out = np.zeros((len(log_ratios), LAGS + 1, BINS), np.int64)
        for counts, log_ratio in zip(out, log_ratios, strict=True):
            bins = _bins(size_of_asinh(log_ratio).numpy(), log_ratio.numpy())
            _add_to_bins(bins, *self._runs_of, counts)
        return torch.from_numpy(out[:, :LAGS])


def _array(column: Tensor) -> np.ndarray:
    return (column if column.dtype == torch.float64 else column.float()).numpy()


@kernel()
def _sums_of_four(a, b, c, d, buckets, stops):
    """Returns the sums of four columns, float [T], in each bucket, float64 [4, buckets].

    Additions wait for the one before; those of other columns fill the time."""
    sums = np.zeros((AT_A_TIME, LAGS + 1))
    start = 0
    for k, stop in zip(buckets, stops):  # noqa: B905 - numba has no `strict`
        w, x, y, z = a[start:stop], b[start:stop], c[start:stop], d[start:stop]
        sum_w = sum_x = sum_y = sum_z = 0.0
        for i in range(w.shape[0]):
            sum_w += w[i]
            sum_x += x[i]
            sum_y += y[i]
            sum_z += z[i]
        sums[0, k] += sum_w
        sums[1, k] += sum_x
        sums[2, k] += sum_y
        sums[3, k] += sum_z
        start = stop
    return sums


@kernel()
def _count(flags, buckets, stops, counts):
    """Adds to each bucket in counts, float64 [buckets], for how many of its tokens flags, uint8 [T], is 1."""
    start = 0
    for k, stop in zip(buckets, stops):  # noqa: B905
        part, total = flags[start:stop], int32(0)
        for i in range(part.shape[0]):
            total += int32(part[i])
        counts[k] += total
        start = stop


@kernel()
def _bins(asinh, sign):
    """Returns the bins, int32 [T], of a size and a sign, float32 [T] each."""
    bins = np.empty(sign.shape[0], int32)
    for i in range(sign.shape[0]):
        position = (np.copysign(asinh[i], sign[i]) / WIDTH + float32(0.5)) * float32(BINS)
        bins[i] = min(max(int32(position), int32(0)), int32(BINS - 1))
    return bins


@kernel()
def _add_to_bins(bins, buckets, stops, counts):
    """Adds each token's bin, int32 [T], to the histogram of its bucket in counts, int64 [buckets, BINS]."""
    start = 0
    for k, stop in zip(buckets, stops):  # noqa: B905
        part, row = bins[start:stop], counts[k]
        for i in range(part.shape[0]):
            row[part[i]] += 1
        start = stop
