"""Metrics that combine exactly: each is a partial result whose merge does not depend on how a batch was cut.

Plain Python numbers and one numpy histogram, so that they can be sent between ranks. Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np


class ReducedMetric(Protocol):
    def merge(self, other: Self) -> Self: ...

    def value(self) -> float | None:
        """None where nothing was counted: the metric is left out."""
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
    """-inf where nothing was counted."""

    max: float

    def merge(self, other: "Max") -> "Max":
        return Max(max(self.max, other.max))

    def value(self) -> float | None:
        return self.max if self.max > -np.inf else None


@dataclass(frozen=True, slots=True)
class EffectiveSampleShare:
    """(Σw)² / (n Σw²): the share of the samples that weights w leave in effect; 1 where all are equal."""

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
    """A mean less the mean of a part of the same samples: how much the others raise it."""

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
    """1 - Var(y - ŷ) / Var(y): 1 where a prediction ŷ is exact up to a constant, 0 where it tells nothing.
    None where all y are equal."""

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


# Bins are uniform in asinh(1000 log w), from w = e^-20 to e^20: about 1 % of log w wide, and never
# narrower than 1e-5, so that a p99 of 1.002 and one of 1e5 are both resolved.
BINS = 2048
BIN_SCALE = 1000.0
BIN_EDGE = float(np.arcsinh(20.0 * BIN_SCALE))


@dataclass(frozen=True, slots=True, eq=False)
class RatioQuantile:
    """A quantile of ratios from a fixed histogram of their logarithms, within 1 % of the logarithm."""

    counts: np.ndarray
    """int64 [BINS]."""
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
    """One partial result out of many, of micro-batches or of data-parallel ranks."""
    merged: Metrics = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merged[key].merge(metric) if key in merged else metric
    return merged


def reduce_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """Returns the values of a step's metrics. What was never counted is left out, not 0 or NaN."""
    values = {key: metric.value() for key, metric in merge_metrics(parts).items()}
    return {key: value for key, value in values.items() if value is not None}
