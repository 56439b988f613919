"""The seam between a learner's step and what computes it: one update (learner/policy_update.py), two backends.

    update_policy ──batches──▶ scores, reference_logprobs     π_prox, π_ref
                  ──losses───▶ backward                       π_θ and its gradient, micro-batch by micro-batch
                  ───────────▶ update                         clip, step

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
"""float32 [T] each: `logprobs` and `entropy`, and `values` where there is a critic; and `routed` (Routed) where
there are experts"""
LossOf = Callable[[int, Scores], tuple[Tensor, Metrics]]
"""Loss and metrics of the batch of that index, from what the policy says about it now"""


class Backend(Protocol):
    """A policy that learns. On several ranks all call the same methods in the same order, each with its own
    batches, and as many of them."""

    cfg: LearnerConfig
    ranks: Ranks
    """Those that share the samples out among them"""
    updates: int
    skipped: int
    skipped_in_row: int

    @property
    def shape(self) -> DecoderConfig:
        """Of the policy"""
        ...

    @property
    def lr(self) -> float:
        """Of the last optimizer step that was taken"""
        ...

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        """What the policy says about each response token now, without gradient; the first with its `graph`,
        where that is asked for and can be kept for `backward`."""
        ...

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        """log π_ref, float32 [T] nats; None where there is no reference policy."""
        ...

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, made: Scores | None = None
    ) -> list[Metrics]:
        """Adds the gradient of all losses, and returns their metrics on every rank that has a part in them.
        `made`: the first batch's scores, which still have their graph."""
        ...

    def update(self) -> tuple[Metrics, bool]:
        """A step of every optimizer on the gradient that was added up, and whether it was taken: not where
        the gradient is not finite."""
        ...


class Shard(Backend, Protocol):
    """This rank's part of a policy. Rank 0 has the `whole` besides, as one process would; others pass None."""

    def gather_weights(self, whole) -> None:
        """What a step changed of the policy, into the whole."""
        ...

    def gather_rest(self, whole) -> None:
        """What else a checkpoint holds: moments, the critic."""
        ...

    def share_of_rest(self, whole) -> dict[str, Tensor]:
        """Of the same, this rank's share by its names in a checkpoint; with the other ranks' it is all that
        `gather_rest` gathers."""
        ...

    def reset_reference(self) -> None:
        """The present policy becomes the reference."""
        ...

    def close(self) -> None:
        """Lets go of process groups of its own."""
        ...
