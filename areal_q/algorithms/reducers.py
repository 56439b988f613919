"""Metrics that combine exactly: partial results whose merger does not depend on how a batch was cut.

They hold plain Python numbers and one numpy histogram, so that ranks can send them to each other without torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


class ReducedMetric(Protocol):
    def merge(self, other: Self) -> Self: ...

    def value(self) -> float | None:
        """Returns the metric; None if nothing was counted, and then it is left out of the record."""
        ...


Metrics = dict[str, ReducedMetric]


@dataclass(frozen=True, slots=True)
class Mean:
    sum: float
    count: float

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> float | None:
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Sum:
    sum: float

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.sum + other.sum)

    def value(self) -> float:
        return self.sum


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of the values, -inf if nothing was counted."""

    max: float

    def merge(self, other: "Max") -> "Max":
        return Max(max(self.max, other.max))

    def value(self) -> float | None:
        return self.max if self.max > -np.inf else None


@dataclass(frozen=True, slots=True)
class EffectiveSampleShare:
    """The effective share of n samples with weights w, (Σw)² / (n Σw²); 1 if all w are equal."""

    sum: float
    sum_of_squares: float
    count: float

    def merge(self, other: "EffectiveSampleShare") -> "EffectiveSampleShare":
        return EffectiveSampleShare(
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
            self.count + other.count,
        )

    def value(self) -> float | None:
        if not self.count or not self.sum_of_squares:
            return None
        return self.sum**2 / (self.count * self.sum_of_squares)


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """The mean of all samples minus the mean of a subset of them: how much the other samples raise it."""

    sum: float
    count: float
    part_sum: float
    part_count: float

    def merge(self, other: "MeanDifference") -> "MeanDifference":
        return MeanDifference(
            self.sum + other.sum,
            self.count + other.count,
            self.part_sum + other.part_sum,
            self.part_count + other.part_count,
        )

    def value(self) -> float | None:
        if not self.part_count:
            return None
        return self.sum / self.count - self.part_sum / self.part_count


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(y - ŷ) / Var(y): 1 if a prediction ŷ is exact up to a constant, 0 if it explains nothing, and no
    value if all y are equal."""

    count: float
    sum: float
    """Σy."""
    sum_of_squares: float
    error: float
    """Σ(y - ŷ)."""
    error_of_squares: float

    def merge(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(
            self.count + other.count,
            self.sum + other.sum,
            self.sum_of_squares + other.sum_of_squares,
            self.error + other.error,
            self.error_of_squares + other.error_of_squares,
        )

    def value(self) -> float | None:
        if not self.count:
            return None
        variance = self.sum_of_squares / self.count - (self.sum / self.count) ** 2
        if variance <= 1e-12 * self.sum_of_squares / self.count:
            return None  # equal but for rounding
        unexplained = self.error_of_squares / self.count - (self.error / self.count) ** 2
        return 1 - unexplained / variance


# Bins are uniform in asinh(1000 log w), from w = e^-20 to e^20. Each is about 1 % of log w wide, and never
# narrower than 1e-5, which resolves a p99 of 1.002 as well as one of 1e5.
BINS = 2048
BIN_SCALE = 1000.0
BIN_EDGE = float(np.arcsinh(20.0 * BIN_SCALE))


@dataclass(frozen=True, slots=True, eq=False)
class RatioQuantile:
    """A quantile of ratios from a histogram of their logarithms, exact to 1 % of the logarithm."""

    counts: np.ndarray
    """int64 [BINS]: number of ratios in each bin."""
    quantile: float = 0.99

    def merge(self, other: "RatioQuantile") -> "RatioQuantile":
        return RatioQuantile(self.counts + other.counts, self.quantile)

    def value(self) -> float | None:
        total = int(self.counts.sum())
        if not total:
            return None
        index = int(np.searchsorted(np.cumsum(self.counts), self.quantile * total))
        middle = ((index + 0.5) / BINS * 2 - 1) * BIN_EDGE
        return float(np.exp(np.sinh(middle) / BIN_SCALE))


def merge_metrics(parts: Iterable[Metrics]) -> Metrics:
    """Merges the partial results of micro-batches or data-parallel ranks into one."""
    merged: Metrics = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merged[key].merge(metric) if key in merged else metric
    return merged


def reduce_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """Returns the values of a step's metrics by name. A metric that counted nothing is left out."""
    values = {key: metric.value() for key, metric in merge_metrics(parts).items()}
    return {key: value for key, value in values.items() if value is not None}
