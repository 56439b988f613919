"""Raw log-ratios of tokens, log w = log π_prox - log π_behav before any truncation, and what they consist of.

A token was drawn with version u and is learnt from at version v; θ are the full-precision weights and
Q(θ) what was published for them. The gap is split along a chain of policies, each a step closer to the
engine, so that the terms add up to log w exactly:

    log w = log π(θ_v) - log π(θ_u)                                   staleness
          + log π(θ_u) - log π(θ_u + Z)                               noise
          + log π(θ_u + Z) - log π(deq Q(θ_u + Z))                    weights
          + log π(deq Q(θ_u + Z)) - log π_Q(θ_u + Z)                  activations
          + log π_Q(θ_u + Z) - the same at the recorded temperature   sampling
          + the rest, up to log π_behav                               cache, or engine

Z: the noise of AQN in the published norms, 0 without it. π(deq Q): weights that were quantized, in the
learner's own forward. π_Q: the format's own linears, as areal_q/quant defines them, hence with quantized
activations. The rest is `cache` where the response had begun with other weights (its keys and values are
theirs) and `engine` elsewhere.

Attribution. Both sums over terms are exact: the KL, mean(-log w) = Σ mean(-term), in which terms of
opposite sign cancel; and the square, mean(log² w) = Σ mean(term · log w), whose shares add up to 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

TERMS = ("staleness", "noise", "weights", "activations", "sampling", "cache", "engine")
_BINS = 31


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """N response tokens that count, of all steps that were looked at. Log-probs in nats."""

    step: np.ndarray
    """int64 [N] learner step in which the token was used"""
    lag: np.ndarray
    """int64 [N] versions"""
    position: np.ndarray
    """int64 [N] place in its response, from 0"""
    response: np.ndarray
    """int64 [N] number of its response, non-decreasing"""
    advantage: np.ndarray
    """float64 [N]"""
    behavior: np.ndarray
    """float64 [N] log π_behav, as recorded"""
    proximal: np.ndarray
    """float64 [N] log π_prox"""
    entropy: np.ndarray
    """float64 [N] of π_prox"""
    terms: np.ndarray
    """float64 [N, len(TERMS)], NaN where version u could not be had again"""

    @property
    def log_w(self) -> np.ndarray:
        return self.proximal - self.behavior

    @property
    def known(self) -> np.ndarray:
        """bool [N]: tokens whose gap is split into terms"""
        return np.asarray(np.isfinite(self.terms).all(-1))

    def where(self, chosen: np.ndarray) -> "TokenTable":
        return TokenTable(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Split:
    """The contribution of one term."""

    term: str
    rms: float
    """nats"""
    kl: float
    """nats per token, part of mean(-log w)"""
    share: float
    """of mean(log² w); below 0 where the term works against the others"""


def split_by_term(tokens: TokenTable) -> list[Split]:
    """One line for each term, of the tokens for which terms are known; none where no token is."""
    known = tokens.where(tokens.known)
    if not len(known):
        return []
    # The chain's own sum, so that float32 rounding of log w leaves no remainder.
    total = known.terms.sum(-1)
    square = float((total**2).mean())
    return [
        Split(
            term,
            rms(known.terms[:, i]),
            float(-known.terms[:, i].mean()),
            float((known.terms[:, i] * total).mean() / square) if square else 0.0,
        )
        for i, term in enumerate(TERMS)
    ]


def by_lag(tokens: TokenTable) -> Iterator[tuple[int, TokenTable]]:
    for lag in np.unique(tokens.lag):
        yield int(lag), tokens.where(tokens.lag == lag)


def histogram(tokens: TokenTable, edge: float) -> np.ndarray:
    """int64 [_BINS] of log w between -edge and edge; what lies beyond is in the outermost bins."""
    clipped = np.clip(tokens.log_w, -edge, edge)
    return np.histogram(clipped, bins=_BINS, range=(-edge, edge))[0]


def by_position(tokens: TokenTable) -> list[tuple[int, int, int, float]]:
    """(first, last, tokens, rms of the gap without staleness) for positions 0, 1, 2–3, 4–7, 8–15, …

    Where terms are unknown the whole of log w stands for the gap.
    """
    stale = tokens.terms[:, TERMS.index("staleness")]
    gap = tokens.log_w - np.where(np.isfinite(stale), stale, 0.0)
    out = []
    first, width = 0, 1
    while (tokens.position >= first).any():
        chosen = (tokens.position >= first) & (tokens.position < first + width)
        if chosen.any():
            out.append((first, first + width - 1, int(chosen.sum()), rms(gap[chosen])))
        first, width = first + width, max(1, first + width)
    return out


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
