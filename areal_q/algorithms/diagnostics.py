"""The metrics that every objective reports, as partial sums of the raw ratios before any truncation.

mismatch/… measures w = π_prox/π_behav, the effect of quantization, engine and staleness. policy/… measures
R = π_θ/π_prox, the effect of the updates on this batch. Both are split by version lag (0, 1, 2, 3 and more)
into mismatch/lag_k/… and policy/lag_k/…: at lag 0 only quantization and the engine can cause a mismatch, at
higher lags staleness as well. mismatch/cause/… splits the mean KL (k3) accordingly: `engine_kl_k3` is the KL of
the tokens at lag 0, `staleness_kl_k3` what the older ones add to it; the two sum up to kl_k3.
KLs, in nats, are estimated from tokens that π_behav drew: k1 = mean(-log ratio),
k3 = mean(ratio - 1 - log ratio).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from areal_q.algorithms.lag_sums import LAGS, LagSums
from areal_q.algorithms.loss_types import LossInputs, PolicyLoss
from areal_q.algorithms.ratios import Ratios, bounded
from areal_q.algorithms.reducers import (
    EffectiveSampleShare,
    Max,
    Mean,
    MeanDifference,
    Metrics,
    RatioQuantile,
    Sum,
)

_Record = TypeVar("_Record", LossInputs, Ratios, PolicyLoss)
CHUNK = 1 << 16
"""Tokens that are processed together, so few that the intermediate tensors stay in a processor's cache."""
MEANS = {
    "mismatch": {
        "weight_mean": "w", "kl": "mismatch_k1", "kl_k3": "mismatch_k3", "truncated_fraction": "truncated",
    },
    "policy": {
        "mask_fraction": "dropped", "ratio_mean": "r", "kl": "policy_k1", "kl_k3": "policy_k3",
        "clip_fraction_up": "up", "clip_fraction_down": "down", "clip_fraction_dual": "dual",
        "entropy": "entropy",
    },
}  # fmt: skip
"""The metrics that are a mean over tokens, and the column that each sums"""


@torch.no_grad()
def diagnostics(inputs: LossInputs, x: Ratios, out: PolicyLoss) -> Metrics:
    """Returns the metrics named in this module. `x` and `out` belong to `inputs`."""
    cuts = [slice(i, i + CHUNK) for i in range(0, max(1, len(x.mask)), CHUNK)]
    parts = [_Sums.of(_cut(inputs, cut), _cut(x, cut), _cut(out, cut)) for cut in cuts]
    names = parts[0].names
    rows = torch.stack([part.sums for part in parts]).sum(0)
    maxima = torch.stack([part.maxima for part in parts]).amax(0)
    table = dict(zip(names, torch.cat([rows, maxima]).tolist(), strict=True))
    counts = torch.stack([part.counts for part in parts]).sum(0).cpu().numpy()
    histograms = {name: [RatioQuantile(row) for row in counts[i]] for i, name in enumerate("wr")}
    metrics = _named("", range(LAGS), table, histograms)
    for k in range(LAGS):
        metrics |= _named(f"lag_{k}/", [k], table, histograms)
    tokens, kl = table["tokens"], table["mismatch_k3"]
    metrics["mismatch/cause/engine_kl_k3"] = Mean(kl[0], tokens[0])
    metrics["mismatch/cause/staleness_kl_k3"] = MeanDifference(
        sum(kl), sum(tokens), kl[0], tokens[0]
    )
    return metrics


def _cut(record: _Record, cut: slice) -> _Record:
    """Returns `record` with only the tokens of `cut` in its tensors [T]."""
    given = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{k: v[cut] for k, v in given.items() if isinstance(v, Tensor)})


@dataclass(frozen=True)
class _Sums:
    """The sums, maxima and histograms of one chunk of tokens, by lag class."""

    names: list[str]
    """Names of the rows of `sums`, then of those of `maxima`."""
    sums: Tensor
    """float64 [columns, LAGS]."""
    maxima: Tensor
    """float64 [2, LAGS], -inf where there is no token."""
    counts: Tensor
    """int64 [2, LAGS, BINS] histograms of w and R."""

    @classmethod
    def of(cls, inputs: LossInputs, x: Ratios, out: PolicyLoss) -> "_Sums":
        # Masked tokens go to an extra bucket, which is dropped.
        lag = inputs.version_lag.clamp(0, LAGS - 1)
        by_lag = LagSums(lag if x.all_count else torch.where(x.mask, lag, LAGS))
        log_w, log_r = bounded(x.log_mismatch), bounded(x.log_ratio)
        columns = dict(_columns(inputs, x, out, log_w, log_r))
        return cls(
            names=[*columns, "log_w_max", "log_r_max"],
            sums=by_lag.sums(columns),
            maxima=by_lag.maxima([log_w, log_r]),
            counts=by_lag.histograms([log_w, log_r]),
        )


def _columns(
    inputs: LossInputs, x: Ratios, out: PolicyLoss, log_w: Tensor, log_r: Tensor
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields (name, values [T]) to sum over tokens; None stands for zeros."""
    raw_w, raw_r = x.log_mismatch, x.log_ratio
    w, r = log_w.exp(), log_r.exp()
    yield "tokens", x.mask
    yield "w", w
    yield "w_squared", w * w
    yield "mismatch_k1", -raw_w
    yield "mismatch_k3", w - 1 - log_w
    yield "truncated", out.truncated
    yield "r", r
    yield "policy_k1", -raw_r
    yield "policy_k3", r - 1 - log_r
    yield "up", out.clipped_up
    yield "down", out.clipped_down
    yield "dual", out.clipped_dual
    yield "dropped", None if out.kept is None else ~out.kept
    yield "entropy", -x.logprobs if inputs.entropy is None else inputs.entropy
    within = log_w is raw_w and log_r is raw_r
    yield "bounded", None if within else (raw_w != log_w) | (raw_r != log_r)


def _named(
    label: str,
    lags: Sequence[int],
    table: dict[str, list[float]],
    histograms: dict[str, list[RatioQuantile]],
) -> Metrics:
    """Returns the metrics of the tokens with these lags, with `label` in their names. `table` holds the sums
    and maxima by name and lag class, `histograms` those of "w" and "r" by lag class."""
    total = {name: sum(row[k] for k in lags) for name, row in table.items()}
    tokens = total["tokens"]
    if not tokens and label:
        return {}

    def largest(name: str) -> Max:
        # exp(-inf) = 0 would claim a ratio of 0 where there is no token.
        return Max(math.exp(max(table[name][k] for k in lags)) if tokens else -math.inf)

    def quantile(name: str) -> RatioQuantile:
        first, *rest = (histograms[name][k] for k in lags)
        for other in rest:
            first = first.merge(other)
        return first

    metrics: Metrics = {
        f"{kind}/{label}{name}": Mean(total[column], tokens)
        for kind, columns in MEANS.items()
        for name, column in columns.items()
    }
    return metrics | {
        f"mismatch/{label}tokens": Sum(tokens),
        f"mismatch/{label}weight_max": largest("log_w_max"),
        f"mismatch/{label}weight_p99": quantile("w"),
        f"mismatch/{label}ess": EffectiveSampleShare(total["w"], total["w_squared"], tokens),
        f"policy/{label}ratio_max": largest("log_r_max"),
        f"policy/{label}ratio_p99": quantile("r"),
        f"policy/{label}bounded_tokens": Sum(total["bounded"]),
    }
