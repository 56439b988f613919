"""Drawing tokens: temperature, top-k, top-p, min-p, and the log-prob of exactly the distribution drawn
from.

Randomness is counter-based: the uniform number for a token is a hash of (the response's seed, the
token's position), so a response does not depend on what else is being generated beside it.
Notation: R rows (responses), V vocabulary.
"""

import torch
from torch import Tensor

from areal_q.config import Sampling

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def mix64(x: Tensor) -> Tensor:
    """splitmix64's finalizer (Steele et al. 2014) on int64 [R], a bijection; arithmetic wraps
    around."""
    z = x ^ ((x >> 30) & ((1 << 34) - 1))  # the mask makes the shift a logical one
    z.mul_(_MIX1)
    z ^= (z >> 27) & ((1 << 37) - 1)
    z.mul_(_MIX2)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def seed_keys(seeds: list[int]) -> Tensor:
    """int64 [R]: one well-mixed stream per seed (any Python int, taken modulo 2⁶⁴)."""
    half = 1 << 63
    return mix64(torch.tensor([(seed + half) % (2 * half) - half for seed in seeds]))


def random_uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """float64 [R] in [0, 1): number `positions` int64 [R] of the streams `keys` int64 [R]."""
    bits = mix64(torch.add(keys, positions, alpha=_GAMMA)) >> 11
    return (bits & ((1 << 53) - 1)).to(torch.float64).mul_(2.0**-53)


def log_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Log-probs float32 [R, V] of what is drawn from `logits` [R, V]; -inf where a token cannot be.

    temperature, top_p, min_p float32 [R]; top_k int64 [R]. The order is temperature, then the `top_k`
    largest (0: all), then among those the fewest largest whose probabilities sum to at least
    `top_p`, then those with at least `min_p` times the largest probability. A temperature of 0
    puts all mass on the first largest logit.
    """
    greedy = (temperature == 0).unsqueeze(-1)
    scaled = logits / torch.where(greedy, 1.0, temperature.unsqueeze(-1))
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k == 0, logits.shape[-1], top_k).unsqueeze(-1)
    limit = torch.where(greedy, 1, limit)
    ordered = ordered.masked_fill(rank >= limit, -torch.inf)
    probs = ordered.softmax(-1, dtype=torch.float64)
    before = probs.cumsum(-1) - probs
    # The largest always stays; where top_p is 1 nothing goes, whatever rounding made of the sum.
    cut = (before >= top_p.unsqueeze(-1)) & (rank > 0) & (top_p < 1).unsqueeze(-1)
    cut |= probs < min_p.unsqueeze(-1) * probs[:, :1]  # never the largest, since min_p < 1
    kept = ordered.masked_fill(cut, -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter_(-1, order, kept)


def sample_tokens(logprobs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [R], their log-probs float32 [R]) by inverse CDF at u float64 [R] in [0, 1).

    The first token whose cumulative probability exceeds u times their sum; a token of probability
    0 adds nothing to the sum and so is never the first. u < 1 keeps u · sum below the sum in
    float64 too.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = u.unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    # Only NaN (diverged weights) can reach the end; the caller sees it in the log-prob.
    tokens.clamp_(max=logprobs.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def sample_untruncated(logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
    """`sample_tokens` for rows that share untruncated settings: no sort, no per-row knobs."""
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        # NaN stays NaN: the log-prob of a token from diverged weights must not look like a certainty.
        return tokens, logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).mul_(0.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    return sample_tokens(logits.log_softmax(-1), u)
