"""Drawing tokens with temperature, top-k, top-p and min-p, and their log-probs under exactly the distribution
that they were drawn from. `draw` is the definition; areal_q/kernels/decoding.py does the same on a CPU, faster.

Randomness is counter-based: the uniform number for a token is a hash of the response's seed and the token's
position, so that a response does not depend on what else is generated in the same batch.
Notation: R rows (responses), V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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


class Knobs(NamedTuple):
    """The sampling settings of R rows."""

    temperature: Tensor
    """float32 [R]"""
    top_k: Tensor
    """int64 [R]"""
    top_p: Tensor
    """float32 [R]"""
    min_p: Tensor
    """float32 [R]"""
    truncated: bool
    """False if no row has top-k, top-p or min-p. The host knows it, so that nobody need ask the device."""

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: str = "cpu") -> "Knobs":
        numbers = [[s.temperature for s in rows], [s.top_p for s in rows], [s.min_p for s in rows]]
        temperature, top_p, min_p = torch.tensor(numbers, device=device)
        top_k = torch.tensor([s.top_k for s in rows], device=device)
        return cls(temperature, top_k, top_p, min_p, any(row.truncated for row in rows))

    def at(self, rows: Tensor) -> "Knobs":
        """Returns those of some `rows`, int64."""
        temperature, top_k, top_p, min_p, truncated = self
        return Knobs(temperature[rows], top_k[rows], top_p[rows], min_p[rows], truncated)


def draw(logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens int64 [R] and their log-probs float32 [R], drawn from logits [R, V] by inverse CDF at u
    float64 [R] in [0, 1), each row by its own settings.

    The temperature is applied first. Then the `top_k` largest tokens stay (0 means all), of these the fewest
    largest whose probabilities sum to at least `top_p`, and of these the ones with at least `min_p` times the
    largest probability. Of equal tokens the smaller id counts as the larger one. A temperature of 0 takes the
    first of the largest logits, with a log-prob of 0.

    The token drawn is the first whose cumulative probability exceeds u times the sum of all. A token of
    probability 0 adds nothing to the sum and so is never the first. Since u < 1, u · sum is below the sum in
    float64 too. Logits that are NaN or +inf (diverged weights) make the log-prob NaN.
    """
    scaled, first = _scaled(logits, knobs)
    return _drawn(scaled, first, knobs, u)


def draw_masked(logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """Does as `draw` for rows with a temperature and a top_k, but that of equal logits at the edge of the
    largest top_k any may stay. Returns also the ids that each row could draw, int32, ascending."""
    most = min(int(knobs.top_k.max()), logits.shape[-1])
    ids = logits.topk(most).indices.sort(-1).values
    scaled, first = _scaled(logits.gather(-1, ids), knobs)
    places, logprobs = _drawn(scaled, first, knobs, u)
    stay = (scaled > -torch.inf).cpu().numpy()
    kept = [row[left] for row, left in zip(ids.to(torch.int32).cpu().numpy(), stay, strict=True)]
    return ids.gather(-1, places.unsqueeze(-1)).squeeze(-1), logprobs, kept


def _scaled(logits: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """Returns log-weights [R, V] of the distribution to draw from, -inf for what cannot be drawn, and the first
    of the largest of each row, int64 [R, 1]."""
    top, first = logits.max(-1, keepdim=True)
    divisor = torch.where(knobs.temperature == 0, 1.0, knobs.temperature).unsqueeze(-1)
    scaled = (logits - top).div_(divisor)
    if knobs.truncated:
        truncate(scaled, knobs)
    return scaled, first


def _drawn(scaled: Tensor, first: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
    greedy = (knobs.temperature == 0).unsqueeze(-1)
    cumulative = scaled.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, u.unsqueeze(-1) * total, right=True)
    tokens = tokens.clamp_(max=scaled.shape[-1] - 1)  # only NaN can reach the end
    tokens = torch.where(greedy, first, tokens)
    logprobs = scaled.gather(-1, tokens) - torch.where(greedy, 0.0, total.log())
    return tokens.squeeze(-1), logprobs.squeeze(-1).float()


def truncate(scaled: Tensor, knobs: Knobs, candidates: int = 1024) -> None:
    """Sets the scaled logits [R, V] of tokens that cannot be drawn to -inf.

    Each truncated row is looked at by its largest `candidates`. Where not all that stay are among them, it is
    done again with 32 times as many, so that what a row keeps depends on no other row.
    """
    vocab = scaled.shape[-1]
    truncated = (knobs.top_k > 0) | (knobs.top_p < 1) | (knobs.min_p > 0)
    left = (truncated & (knobs.temperature > 0)).nonzero().squeeze(-1)
    while len(left):
        rows, count = scaled[left], min(candidates, vocab)
        top_k, top_p, min_p = (knob[left].unsqueeze(-1) for knob in knobs[1:4])
        limit = torch.where(top_k == 0, vocab, top_k)
        values, rank = rows.topk(count).values, torch.arange(count, device=scaled.device)
        sums = values.masked_fill(rank >= limit, -torch.inf).exp().cumsum(-1, dtype=torch.float64)
        whole = rows.exp().cumsum(-1, dtype=torch.float64)[:, -1:]
        total = torch.where(limit < vocab, sums[:, -1:], whole)
        # The largest always stays, and a top_p of 1 removes nothing, even if the sum is rounded above 1.
        stays = (rank == 0) | (top_p == 1) | (sums.roll(1, -1) < top_p * total)
        stays &= (rank < limit) & (values >= min_p.log())
        kept = stays.sum(-1, keepdim=True).clamp_(min=1)  # NaN would keep nothing
        bound = values.gather(-1, kept - 1)
        ties = ((values == bound) & (rank < kept)).sum(-1, keepdim=True)
        equal = rows == bound
        stay = (rows > bound) | (equal & (equal.cumsum(-1) <= ties))
        known = (kept < count) & ((limit <= count) | (limit >= vocab)) | (count == vocab)
        known = known.squeeze(-1)
        scaled[left[known]] = rows.masked_fill_(~stay, -torch.inf)[known]
        left, candidates = left[~known], 32 * candidates
