"""The interface between a learner's step (learner/policy_update.py) and the two backends that compute it.

    update_policy ──batches──▶ scores, reference_logprobs     π_prox, π_ref
                  ──losses───▶ backward                       π_θ and its gradient, micro-batch by micro-batch
                  ───────────▶ step_optimizer                 clip, step

`torch` is learner/backends/single_device.py: one device, or FSDP2 over several (learner/backends/fsdp.py).
`megatron` is learner/backends/megatron/policy.py. Where several ranks hold a policy together, each has a
`Shard` of it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from areal_q.algorithms.reducers import Metrics
from areal_q.config import LearnerConfig
from areal_q.models import DecoderConfig
from learner.backends.data_parallel import Ranks
from learner.data.packing import PackedBatch

Scores = dict[str, Any]
"""The policy's view of a batch's T response tokens, by name: `logprobs` and `entropy`, in nats, and `values` if
there is a critic, float32 [T] each; and `routed` (Routed) if there are experts."""
LossOf = Callable[[int, Scores], tuple[Tensor, Metrics]]
"""A function that returns loss and metrics of the batch of an index, from its present scores."""


class Backend(Protocol):
    """A policy that learns. On several ranks all call the same methods in the same order, each with its own
    batches, and as many of them."""

    cfg: LearnerConfig
    ranks: Ranks
    """The ranks that share out the samples among them."""
    updates: int
    """Number of optimizer steps tried since the run began."""
    skipped: int
    """Number of these that were skipped because a gradient was not finite."""
    skipped_in_row: int
    """Number of steps skipped since the last one that was taken."""

    @property
    def shape(self) -> DecoderConfig:
        """The architecture of the policy."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate of the last optimizer step that was taken."""
        ...

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        """Returns the present scores of each batch, without gradient. With `graph`, the first batch's keep
        their graph for `backward`, if the backend can keep it."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        """Returns log π_ref of each batch, float32 [T] nats; None if there is no reference policy."""
        ...

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, first_scores: Scores | None = None
    ) -> list[Metrics]:
        """Adds the gradients of all losses, and returns their metrics on every rank that takes part in them.
        `first_scores` are the first batch's if these still have their graph."""
        ...

    def step_optimizer(self) -> tuple[Metrics, bool]:
        """Takes a step of every optimizer on the accumulated gradient, unless that is not finite. Returns
        metrics, and whether the step was taken."""
        ...


class Shard(Backend, Protocol):
    """This rank's part of a policy. Rank 0 also has the `whole` policy, as one process would; others pass
    None."""

    def gather_weights(self, whole) -> None:
        """Copies the weights that a step changed into the whole policy."""
        ...

    def gather_rest(self, whole) -> None:
        """Copies the rest of a checkpoint into the whole policy: moments and the critic."""
        ...

    def share_of_rest(self, whole) -> dict[str, Tensor]:
        """Returns this rank's share of what `gather_rest` copies, by its names in a checkpoint. The shares of
        all ranks together are the whole."""
        ...

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy."""
        ...

    def close(self) -> None:
        """Closes process groups of its own."""
        ...
