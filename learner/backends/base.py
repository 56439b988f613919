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
"""The policy's scores of a batch's T response tokens, by name: `logprobs` and `entropy`, in nats, and `values`
if there is a critic, float32 [T] each; and `routed` (Routed) if there are experts."""
LossOf = Callable[[int, Scores], tuple[Tensor, Metrics]]
"""A function that returns loss and metrics of the batch with a given index, from the batch's present scores."""


class Backend(Protocol):
    """A policy that learns. All ranks call the same methods in the same order, with equally many
    batches of their own."""

    cfg: LearnerConfig
    ranks: Ranks
    """The ranks among which the samples are divided."""
    updates: int
    """Number of optimizer steps tried since the run began."""
    skipped: int
    """Number of optimizer steps that were skipped because a gradient was not finite."""
    skipped_in_row: int
    """Number of steps skipped since the last one that was taken."""

    @property
    def shape(self) -> DecoderConfig:
        """The architecture of the policy."""
        ...

    @property
    def parallel(self) -> int:
        """Number of micro-batches that are computed at once."""
        ...

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        """Returns the present scores of each batch, without gradient. With `graph`, those of the first batch
        keep their graph for `backward`, if the backend supports it."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        """Returns log π_ref of each batch, float32 [T] nats; None if there is no reference policy."""
        ...

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, first_scores: Scores | None = None
    ) -> list[Metrics]:
        """Accumulates the gradients of all batches' losses, and returns the metrics of each batch.
        `first_scores` are those of the first batch if they still have their graph."""
        ...

    def step_optimizer(self) -> tuple[Metrics, bool]:
        """Takes a step of every optimizer on the accumulated gradient, unless that is not finite. Returns
        metrics, and True if the step was taken."""
        ...


class Shard(Backend, Protocol):
    """This rank's part of a sharded policy. As `whole` rank 0 passes the whole policy, other ranks None."""

    def gather_weights(self, whole) -> None:
        """Copies the weights that a step changed into the whole policy."""
        ...

    def gather_rest(self, whole) -> None:
        """Copies the optimizers' moments and the critic, which a checkpoint needs too, into the whole
        policy."""
        ...

    def share_of_rest(self, whole) -> dict[str, Tensor]:
        """Returns this rank's share of the tensors that `gather_rest` copies, by their names in a checkpoint.
        The shares of all ranks together are complete."""
        ...

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy."""
        ...

    def close(self) -> None:
        """Closes the process groups that this shard created."""
        ...
