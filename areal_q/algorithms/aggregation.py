"""Aggregation of per-token values to one number that does not depend on how the batch was cut or packed.

A mean becomes a weighted sum over tokens, whose weights contain the counts of the whole optimizer step
(`Totals`).
"""

import torch
from torch import Tensor

from areal_q.algorithms.loss_types import LossInputs, Totals
from areal_q.algorithms.policy_losses import kept_before_update
from areal_q.algorithms.ratios import Ratios, ratios
from areal_q.config.objectives import (
    AggregationConfig,
    ObjectiveConfig,
    SeqMeanTokenMean,
    SeqMeanTokenSumNorm,
    TokenMean,
)


def count(inputs: LossInputs, objective: ObjectiveConfig) -> Totals:
    """Returns what this micro-batch adds to the step's Totals. Sum it over micro-batches and ranks before the
    first loss.

    The counts depend on the proximal and behaviour log-probs only if masked-out tokens leave the denominator,
    and never on `logprobs`, which may be any finite stand-in, such as the proximal ones.
    """
    x = ratios(inputs)
    return totals_of(counted_tokens(x, objective), x)


def totals_of(counted: Tensor, x: Ratios) -> Totals:
    """Returns the counts of the tokens where `counted`, bool [T], is True."""
    lengths = x.count_by_sequence(counted)
    if x.share is None:
        return Totals(int(counted.count_nonzero()), int(lengths.count_nonzero()))
    episodes = (x.share / lengths.clamp(min=1)[x.sequence_ids])[counted].sum()
    return Totals(int(counted.count_nonzero()), float(episodes))


def counted_tokens(x: Ratios, objective: ObjectiveConfig) -> Tensor:
    """Returns bool [T], True for the tokens that count in the denominator of a mean."""
    kept = kept_before_update(x, objective)
    return x.mask if kept is None else x.mask & kept


def token_weights(
    counted: Tensor, x: Ratios, aggregation: AggregationConfig, totals: Totals
) -> Tensor:
    """Returns the weights [T] with which Σ weight · value is the aggregate; 0 where `counted` is False.

    token_mean: 1 / tokens; seq_mean_token_mean: 1 / (tokens of the sequence · sequences);
    seq_mean_token_sum_norm: 1 / (length · sequences). Sequences without a counted token do not count. An
    episode of several paths is one sequence here: each of its tokens has the weight that it would have if they
    stood in one row. Where masked tokens leave the denominator, a path's tokens still have together the path's
    share of the tokens that the loss mask lets count.
    """
    match aggregation:
        case TokenMean():
            return _numbers(counted, x) / max(totals.tokens, 1)
        case SeqMeanTokenSumNorm(length=length):
            return _numbers(counted, x) / (length * max(totals.sequences, 1))
        case SeqMeanTokenMean():
            lengths = x.count_by_sequence(counted).clamp(min=1)
            weights = (1 / (lengths * max(totals.sequences, 1))).index_select(0, x.sequence_ids)
            weights = weights if x.share is None else weights * x.share
            return weights if x.everywhere(counted) else torch.where(counted, weights, 0.0)


def _numbers(counted: Tensor, x: Ratios) -> Tensor:
    """Returns 1 where `counted` [T] is True and else 0; to fill a tensor takes a sixth of converting one."""
    if x.everywhere(counted):
        return torch.ones_like(x.advantages)
    return counted.to(x.advantages.dtype)
