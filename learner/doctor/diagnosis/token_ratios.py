"""Raw log-ratios of tokens, log w = log π_prox - log π_behav before any truncation, split into terms by cause.

A token was drawn with version u and is learnt from at version v; θ are the full-precision weights and
Q(θ) the tensors published for them. The gap is split along a chain of policies, each one step closer to the
engine, so that the terms add up to log w exactly:

    log w = log π(θ_v) - log π(θ_u)                                   staleness
          + log π(θ_u) - log π(θ_u + Z)                               noise
          + log π(θ_u + Z) - log π(deq Q(θ_u + Z))                    weights
          + log π(deq Q(θ_u + Z)) - log π_Q(θ_u + Z)                  activations
          + log π_Q(θ_u + Z) - the same at the recorded temperature   sampling
          + the rest, up to log π_behav                               cache, or engine

Z is the noise of AQN in the published norms, 0 without it. π(deq Q) is the learner's own forward on weights
that were quantized and dequantized. π_Q uses the format's linears, as areal_q/quant defines them, hence
quantized activations. The rest is called `cache` for tokens of a response that had begun with other weights,
whose cached keys and values it uses, and `engine` for all others.

Two measures are split over the terms, both exactly: the KL, mean(-log w) = Σ mean(-term), in which terms of
opposite sign cancel, and the square, mean(log² w) = Σ mean(term · log w), whose shares add up to 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

TERMS = ("staleness", "noise", "weights", "activations", "sampling", "cache", "engine")
_BINS = 31


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """The N response tokens that count, of all examined steps. Log-probs, entropies and terms are in nats."""

    step: np.ndarray
    """int64 [N]: the learner step that used the token."""
    lag: np.ndarray
    """int64 [N]: the token's version lag."""
    position: np.ndarray
    """int64 [N]: the token's position in its response, from 0."""
    response: np.ndarray
    """int64 [N]: the number of the token's response, non-decreasing."""
    advantage: np.ndarray
    """float64 [N]: the token's advantage."""
    behavior: np.ndarray
    """float64 [N]: log π_behav, as recorded."""
    proximal: np.ndarray
    """float64 [N]: log π_prox."""
    entropy: np.ndarray
    """float64 [N]: the entropy of π_prox."""
    terms: np.ndarray
    """float64 [N, len(TERMS)]: the terms of log w, NaN if the replay did not reproduce version u."""

    @property
    def log_w(self) -> np.ndarray:
        return self.proximal - self.behavior

    @property
    def known(self) -> np.ndarray:
        """True for tokens whose gap is split into terms, bool [N]."""
        return np.asarray(np.isfinite(self.terms).all(-1))

    def where(self, chosen: np.ndarray) -> "TokenTable":
        return TokenTable(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class GapTerm:
    """The contribution of one term."""

    term: str
    rms: float
    """Root mean square of the term, in nats."""
    kl: float
    """The term's part of mean(-log w), in nats per token."""
    share: float
    """The term's share of mean(log² w), negative if it works against the others."""


def split_by_term(tokens: TokenTable) -> list[GapTerm]:
    """Returns the contribution of each term, over the tokens whose terms are known; empty if there are none."""
    known = tokens.where(tokens.known)
    if not len(known):
        return []
    # The sum of the terms is used for log w, as the latter's float32 rounding would leave a remainder.
    total = known.terms.sum(-1)
    square = float((total**2).mean())
    return [
        GapTerm(
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
    """Returns the histogram, int64 [_BINS], of log w from -edge to edge; values beyond count in the outer
    bins."""
    clipped = np.clip(tokens.log_w, -edge, edge)
    return np.histogram(clipped, bins=_BINS, range=(-edge, edge))[0]


def by_position(tokens: TokenTable) -> list[tuple[int, int, int, float]]:
    """Returns (first, last, tokens, rms of log w without staleness in nats) for positions 0, 1, 2–3, 4–7, 8–15,
    …

    For tokens whose terms are unknown, staleness is not subtracted.
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
