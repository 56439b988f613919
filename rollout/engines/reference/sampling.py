"""Drawing tokens with temperature, top-k, top-p and min-p, and their log-probs under exactly the distribution
that they were drawn from.

Randomness is counter-based: the uniform number for a token is a hash of the response's seed and the token's
position, so that a response does not depend on what else is generated in the same batch.
Notation: R rows (responses), V vocabulary.
"""

import torch
from torch import Tensor

from areal_q.config import Sampling

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def mix64(x: Tensor) -> Tensor:
    """Returns splitmix64's finalizer (Steele et al. 2014), a bijection, of x int64 [R]. Arithmetic wraps
    around."""
    z = x ^ ((x >> 30) & ((1 << 34) - 1))  # the mask makes the shift a logical one
    z.mul_(_MIX1)
    z ^= (z >> 27) & ((1 << 37) - 1)
    z.mul_(_MIX2)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def seed_keys(seeds: list[int]) -> Tensor:
    """Returns keys int64 [R] of streams of random numbers, one for each seed. A seed is any Python int, taken
    modulo 2⁶⁴."""
    half = 1 << 63
    return mix64(torch.tensor([(seed + half) % (2 * half) - half for seed in seeds]))


def random_uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns float64 [R] in [0, 1): the numbers at `positions` int64 [R] in the streams `keys` int64 [R]."""
    bits = mix64(torch.add(keys, positions, alpha=_GAMMA)) >> 11
    return (bits & ((1 << 53) - 1)).to(torch.float64).mul_(2.0**-53)


def log_distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Returns the log-probs, float32 [R, V], of the distribution that is drawn from, given `logits` [R, V].
    They are -inf for a token that cannot be drawn.

    temperature, top_p and min_p are float32 [R], and top_k is int64 [R]. The temperature is applied first. Then
    the `top_k` largest tokens stay (0 means all), of these the fewest largest whose probabilities sum to at
    least `top_p`, and of these the ones with at least `min_p` times the largest probability. A temperature of 0
    gives probability 1 to the first of the largest logits.
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
    # The largest always stays, and a top_p of 1 removes nothing, even if the sum is rounded above 1.
    cut = (before >= top_p.unsqueeze(-1)) & (rank > 0) & (top_p < 1).unsqueeze(-1)
    cut |= probs < min_p.unsqueeze(-1) * probs[:, :1]  # never the largest, since min_p < 1
    kept = ordered.masked_fill(cut, -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter_(-1, order, kept)


def sample_tokens(logprobs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [R] and their log-probs float32 [R], by inverse CDF at u float64 [R] in [0, 1).

    The token drawn is the first whose cumulative probability exceeds u times the sum of all. A token of
    probability 0 adds nothing to the sum and so is never the first. Since u < 1, u · sum is below the sum in
    float64 too.
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = u.unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    # Only NaN (diverged weights) can reach the end; the caller sees it in the log-prob.
    tokens.clamp_(max=logprobs.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def sample_untruncated(logits: Tensor, sampling: Sampling, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `sample_tokens` does, from logits [R, V] of rows that share settings without top-k, top-p
    and min-p. It needs no sort."""
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        # NaN stays NaN: the log-prob of a token from diverged weights must not look like a certainty.
        return tokens, logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).mul_(0.0)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    return sample_tokens(logits.log_softmax(-1), u)
