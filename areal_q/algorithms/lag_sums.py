"""Sums, maxima and histograms of a chunk of T tokens by lag class, added in float64, since float32 would lose
the small terms of a KL among 10⁶ tokens."""

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from areal_q.algorithms.reducers import BIN_EDGE, BIN_SCALE, BINS

LAGS = 4
"""Number of lag classes: lags 0, 1, 2, and 3 or more."""


class LagSums:
    """Sums by lag class, in torch. `bucket`, int64 [T], holds lag classes, and LAGS for what is left out."""

    def __init__(self, bucket: Tensor) -> None:
        self.bucket = bucket

    def sums(self, columns: Mapping[str, Tensor | None]) -> Tensor:
        """Returns the sums of columns [T], numbers or bools, in each class: float64 [columns, LAGS]. None
        stands for zeros."""
        zeros = torch.zeros(LAGS, dtype=torch.float64, device=self.bucket.device)
        return torch.stack([zeros if c is None else self._sum(c) for c in columns.values()])

    def maxima(self, columns: Iterable[Tensor]) -> Tensor:
        """Returns the maxima of columns [T] in each class, float64 [columns, LAGS]; -inf without a token."""
        return torch.stack([self._maximum(column) for column in columns])

    def histograms(self, log_ratios: Iterable[Tensor]) -> Tensor:
        """Returns a histogram per class of log-ratios [T], float: int64 [ratios, LAGS, BINS]; reducers.py has
        the bins."""
        return torch.stack([self._histogram(log_ratio) for log_ratio in log_ratios])

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """Buckets and lengths of the runs of neighbours in one bucket. They are far fewer than tokens, since
        consecutive tokens mostly share a version."""
        return torch.unique_consecutive(self.bucket, return_counts=True)

    def _sum(self, column: Tensor) -> Tensor:
        buckets, lengths = self._runs
        runs = torch.segment_reduce(column.double(), "sum", lengths=lengths, unsafe=True)
        return runs.new_zeros(LAGS + 1).index_add_(0, buckets, runs)[:LAGS]

    def _maximum(self, column: Tensor) -> Tensor:
        lowest = torch.full((LAGS + 1,), -torch.inf, dtype=torch.float64, device=column.device)
        return lowest.scatter_reduce_(0, self.bucket, column.double(), "amax")[:LAGS]

    def _histogram(self, log_ratio: Tensor) -> Tensor:
        z = (log_ratio * BIN_SCALE).abs_()  # torch.asinh takes ten times as long as its formula
        asinh = (z * z).add_(1).sqrt_().add_(z).log_().copysign_(log_ratio)
        position = asinh.div_(2 * BIN_EDGE).add_(0.5).mul_(BINS)
        index = position.long().clamp_(0, BINS - 1).add_(self.bucket, alpha=BINS)
        counts = torch.bincount(index, minlength=(LAGS + 1) * BINS)[: LAGS * BINS]
        return counts.reshape(LAGS, BINS)
