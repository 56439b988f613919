"""The inputs and outputs of a loss.

Notation: T response tokens of a micro-batch, packed without padding; S sequences (responses).
Every micro-batch holds whole sequences, since a sequence-level ratio is a mean over all of a response's tokens.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_q.algorithms.reducers import Metrics


@dataclass(frozen=True)
class Routed:
    """What the routers of a mixture of experts did in the forward pass that gave the log-probs, summed over the
    positions that predict a token that counts. L is the number of sparse layers, E of experts."""

    metrics: Metrics
    probs: Tensor
    """float32 [L, E], with gradient: router probabilities summed over the tokens."""
    taken: Tensor
    """float32 [L, E]: how many tokens each expert was run on."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The response tokens of whole sequences, one after the other.

    Example: two responses of 3 and 2 tokens, the second with a tool's output as its first token:
    sequence_ids [0, 0, 0, 1, 1], num_sequences 2, mask [1, 1, 1, 0, 1], advantages [.7, .7, .7, -.7, -.7].
    Log-probs are in nats, of any floating dtype; ratios are computed in float32, or in float64 if an
    input is float64. Values where `mask` is False are ignored and may be anything.
    """

    logprobs: Tensor
    """[T] log π_θ, with gradient."""
    proximal_logprobs: Tensor
    """[T] log π_prox: the learner's policy just before it began to update on this batch."""
    behavior_logprobs: Tensor
    """[T] log π_behav, under the very distribution that drew the token."""
    advantages: Tensor
    """[T] advantage A of each token."""
    mask: Tensor
    """bool [T]: True on tokens that count."""
    sequence_ids: Tensor
    """int64 [T] in 0 … S-1, non-decreasing."""
    num_sequences: int
    version_lag: Tensor
    """int64 [T]: the learner's version minus that of the weights that drew the token."""
    entropy: Tensor | None = None
    """[T] nats, with gradient if an entropy bonus is on. If None, the metrics estimate it by -log π_θ."""
    reference_logprobs: Tensor | None = None
    """[T] log π_ref; needed for a KL term in the loss."""
    teacher_logprobs: Tensor | None = None
    """[T] log π_T of a teacher that scored the tokens; None without one."""
    values: Tensor | None = None
    """[T] the critic's values, with gradient. A value loss needs these and the next two."""
    old_values: Tensor | None = None
    """[T] the critic's values before the updates on this batch."""
    returns: Tensor | None = None
    """[T] targets of the critic."""
    routed: Routed | None = None
    """What the routers did; None for a model without experts."""
    share: Tensor | None = None
    """[T] the share in which each token's sequence stands for its episode, whose sequences' shares add up to 1;
    None if each is an episode of its own."""
    labels: tuple[str, ...] = ()
    """[S] names of the sequences in error messages; if empty, messages give their numbers."""

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
    gradients of the micro-batches add up to the gradient of the step. See `count`.
    """

    tokens: int
    """Tokens that count."""
    sequences: float
    """Sequences with at least one such token; those of one episode count as one."""

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences)


@dataclass(frozen=True)
class PolicyLoss:
    """The objective J of each token and what it did to the token: tensors [T], 0 or False outside `mask`."""

    objective: Tensor
    """float: J, to be maximised, with gradient. The loss is its negative, aggregated."""
    kept: Tensor | None = None
    """bool: False where the objective masked the token out; None if it masked none."""
    truncated: Tensor | None = None
    """bool: True where the mismatch weight was above (or below) its cap; None if none was."""
    clipped_up: Tensor | None = None
    """bool: True where A > 0 and the ratio exceeds its upper bound, so that the bound replaces it."""
    clipped_down: Tensor | None = None
    """bool: True where A < 0 and the ratio is under its lower bound."""
    clipped_dual: Tensor | None = None
    """bool: True where A < 0 and the ratio exceeds its upper bound (dual clip, TBPO's band)."""


@dataclass(frozen=True)
class LossOutputs:
    """A micro-batch's share of the step's loss. Sum the losses, or their gradients, over micro-batches."""

    loss: Tensor
    """Scalar, to be minimised."""
    metrics: Metrics
    """Partial sums; `reduce_metrics` combines those of all micro-batches."""
    policy_loss: PolicyLoss
    """The policy loss of each token, before aggregation."""
