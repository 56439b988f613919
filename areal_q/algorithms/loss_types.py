"""What goes into a loss and what comes out of it.

Notation: T response tokens of a micro-batch, packed with no padding; S sequences (responses).
Every micro-batch holds whole sequences: sequence-level ratios are means over all of a response's tokens.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_q.algorithms.reducers import Metrics


@dataclass(frozen=True)
class Routed:
    """What the routers of a mixture of experts did in the forward behind the log-probs, where tokens that count
    are predicted. L sparse layers, E experts."""

    metrics: Metrics
    probs: Tensor
    """float32 [L, E] with gradient: probabilities summed over the tokens."""
    taken: Tensor
    """float32 [L, E]: how often each expert was run."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The response tokens of whole sequences, one after the other.

    Example: two responses of 3 and 2 tokens, the second with a tool's output as its first token:
    sequence_ids [0, 0, 0, 1, 1], num_sequences 2, mask [1, 1, 1, 0, 1], advantages [.7, .7, .7, -.7, -.7].
    Log-probs are nats of any floating dtype; ratios are computed in float32, or float64 where an
    input is float64. Values where `mask` is False are never looked at and may be anything.
    """

    logprobs: Tensor
    """[T] log π_θ, with gradient."""
    proximal_logprobs: Tensor
    """[T] log π_prox: the learner's policy just before it began to update on this batch."""
    behavior_logprobs: Tensor
    """[T] log π_behav: of the distribution that drew the token."""
    advantages: Tensor
    """[T]."""
    mask: Tensor
    """bool [T]: True on tokens that count."""
    sequence_ids: Tensor
    """int64 [T] in 0 … S-1, non-decreasing."""
    num_sequences: int
    version_lag: Tensor
    """int64 [T]: the learner's version minus that of the weights that drew the token."""
    entropy: Tensor | None = None
    """[T] nats; with gradient if an entropy bonus is on. None: estimated by -log π_θ in the metrics."""
    reference_logprobs: Tensor | None = None
    """[T] log π_ref; needed for a KL term in the loss."""
    values: Tensor | None = None
    """[T] the critic's values, with gradient; needed for a value loss, as are the next two."""
    old_values: Tensor | None = None
    """[T] the critic's values before the updates on this batch."""
    returns: Tensor | None = None
    """[T] targets of the critic."""
    routed: Routed | None = None
    """None: no experts."""
    labels: tuple[str, ...] = ()
    """[S] what each sequence is called in errors; empty: by its number."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                assert value.shape == self.logprobs.shape, (
                    f"{field.name} is {list(value.shape)}, logprobs is {list(self.logprobs.shape)}"
                )
        assert self.mask.dtype == torch.bool, f"mask is {self.mask.dtype}"


@dataclass(frozen=True)
class Totals:
    """Counts over the whole optimizer step, all micro-batches and data-parallel ranks together.

    Every term of the loss is divided by these and never by a count of the micro-batch, so that the
    gradients of micro-batches simply add up to that of the step. See `count`.
    """

    tokens: int
    """Tokens that count."""
    sequences: int
    """Sequences with at least one such token."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences)


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of each token, as its objective J: tensors [T]; J = 0 and masks False outside `mask`."""

    objective: Tensor
    """J, to be maximised, with gradient; the loss is its negative, aggregated."""
    kept: Tensor | None = None
    """bool: False where the objective masked the token out; None: nothing was."""
    truncated: Tensor | None = None
    """bool: the mismatch weight was over (or under) its cap; None: nothing was."""
    clipped_up: Tensor | None = None
    """bool: no gradient, since A > 0 and the ratio is over its upper bound."""
    clipped_down: Tensor | None = None
    """bool: no gradient, since A < 0 and the ratio is under its lower bound."""
    clipped_dual: Tensor | None = None
    """bool: no gradient, since A < 0 and the ratio is over its upper bound (dual clip, TBPO's band)."""


@dataclass(frozen=True)
class LossOutputs:
    """A micro-batch's share of the step's loss. Sum the losses, or their gradients, over micro-batches."""

    loss: Tensor
    """Scalar, to be minimised."""
    metrics: Metrics
    """Partial sums: combine the micro-batches' by `reduce_metrics`"""
    policy_loss: PolicyLoss
    """The policy loss of each token, before aggregation."""
