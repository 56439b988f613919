"""The policy update of one learner step, on any backend: π_prox, then `epochs` passes over the batch, an
optimizer step for each part of it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, loss_fn, reduce_metrics
from areal_q.algorithms.loss import whole_step
from areal_q.algorithms.reducers import Metrics
from areal_q.config import Gae, LearnerConfig
from areal_q.errors import ConfigError, DivergedError
from learner.backends.base import Backend, Scores
from learner.backends.routing_replay import balance_weights
from learner.backends.single_device import TorchPolicy
from learner.data.packing import PackedBatch, Sample, masked, pack
from learner.measure.token_recorder import TokenRecorder
from learner.policy_advantages import needs_policy, with_advantages

MICROBATCH = "train/microbatch_tokens"
"""It may change when a run resumes, and sums then round otherwise: a replay must know"""
Part = list[tuple[PackedBatch, LossInputs]]
"""The micro-batches of one optimizer step"""


class PolicyUpdater(Protocol):
    """Makes the updates of rank 0's whole policy: this process alone, or all ranks together (sharded.py)."""

    policy: TorchPolicy

    @property
    def shares(self) -> int:
        """Number of other ranks that write a share of a checkpoint themselves"""
        ...

    def update(
        self, samples: Sequence[Sample], recorder: TokenRecorder | None = None
    ) -> dict[str, float]:
        """Learns from `samples`, after which `policy` holds the new weights; returns the metrics."""
        ...

    def collect(self, staged: Path | None = None) -> dict[str, Tensor]:
        """Brings into `policy` what a checkpoint reads of it.

        Where other ranks write shares, they write them into `staged`, and this rank's own is returned, by its
        tensors' names in a checkpoint.
        """
        ...

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy, on every rank."""
        ...

    def close(self) -> None:
        """Lets other processes go, if there are any."""
        ...


class SingleProcessUpdater:
    """The PolicyUpdater of one process, which holds the whole policy."""

    shares = 0

    def __init__(self, policy: TorchPolicy) -> None:
        self.policy = policy

    def update(
        self, samples: Sequence[Sample], recorder: TokenRecorder | None = None
    ) -> dict[str, float]:
        return update_policy(self.policy, samples, recorder)

    def collect(self, staged: Path | None = None) -> dict[str, Tensor]:
        return {}

    def reset_reference(self) -> None:
        self.policy.reset_reference()

    def close(self) -> None:
        pass


def update_policy(
    b: Backend, samples: Sequence[Sample], recorder: TokenRecorder | None = None
) -> dict[str, float]:
    """Learns from `samples` and returns the metrics.

    The result depends on weights, samples and their order alone. `recorder` keeps what the token log
    holds of the step. On several ranks all of them call this together.
    """
    parts = prepare(b, samples)
    if recorder:
        recorder.begin()
    metrics: list[Metrics] = []
    for visit, part in enumerate(parts * b.cfg.epochs):
        metrics += visit_part(b, part, first=visit == 0, recorder=recorder)
        metrics.append(_update(b))
    values = reduce_metrics(b.ranks.metrics(metrics))
    values["train/loss"] = values["loss/total"] / (len(parts) * b.cfg.epochs)
    values["train/lr"] = b.lr
    values[MICROBATCH] = b.cfg.microbatch_tokens
    values["train/skipped_steps"] = b.skipped
    return values


def prepare(b: Backend, samples: Sequence[Sample]) -> list[Part]:
    """One part for every optimizer step. All of π_prox before the first update: it is the policy just before
    this batch changes it. Raises ConfigError for a sample that no micro-batch has room for."""
    _fits(samples, b.cfg)
    shares = [_microbatches(b, cut) for cut in minibatches(samples, b.cfg)]
    # A graph lasts until the forwards of other ranks' parts of the model are due.
    parts = [_scored(b, share, graph=number == 0) for number, share in enumerate(shares)]
    if not needs_policy(b.cfg):
        return parts
    own = [sample for share in shares for cut, batch in share if batch.counts for sample in cut]
    inputs = [x for part in parts for batch, x in part if batch.counts]
    each = iter(with_advantages(inputs, own, b.cfg, b.ranks.add))
    return [
        [
            (batch, next(each) if batch.counts else replace(x, returns=x.old_values))
            for batch, x in part
        ]
        for part in parts
    ]


def minibatches(samples: Sequence[Sample], cfg: LearnerConfig) -> list[list[Sample]]:
    """Cuts `samples` into at most `cfg.minibatches` parts of equally many. Where responses are still to be
    compared within their group, which a rank must then meet as a whole, they are parts of equally many groups:
    some groups may lack responses that could not be scored."""
    whole = needs_policy(cfg) and not isinstance(cfg.advantage, Gae)
    groups = groupby(samples, key=lambda sample: sample.group)
    units = [list(members) for _, members in groups] if whole else [[s] for s in samples]
    size = -(-len(units) // cfg.minibatches)
    return [list(chain(*units[i : i + size])) for i in range(0, len(units), size)]


def _fits(samples: Sequence[Sample], cfg: LearnerConfig) -> None:
    longest = max(samples, key=lambda sample: sample.num_tokens)
    if longest.num_tokens > cfg.microbatch_tokens:
        raise ConfigError(
            f"learner.microbatch_tokens = {cfg.microbatch_tokens}: ticket {longest.group}, response "
            f"{longest.trajectory.index} has {longest.num_tokens} tokens, its prompt's included"
        )


def _microbatches(
    b: Backend, samples: Sequence[Sample]
) -> list[tuple[Sequence[Sample], PackedBatch]]:
    """This rank's; those with a gradient and without are apart: of no advantage, they need no backward."""
    cfg = b.cfg
    all_learn = bool(cfg.critic or cfg.reference_kl or cfg.entropy_coef or cfg.router_aux_coef)
    useful = [sample for sample in samples if sample.advantage or all_learn]
    others = [sample for sample in samples if not (sample.advantage or all_learn)]
    return [
        (cut, pack(cut or [masked(samples[0])], b.cfg.device, learns, counts=bool(cut)))
        for kind, learns in ((useful, True), (others, False))
        for cut in b.ranks.cuts(kind, b.cfg.microbatch_tokens)
    ]


def _scored(b: Backend, share: Sequence[tuple[Sequence[Sample], PackedBatch]], graph: bool) -> Part:
    """The loss's inputs before the update, where π_θ is still π_prox."""
    batches = [batch for _, batch in share]
    scores, reference = b.scores(batches, graph), b.reference_logprobs(batches)
    return [
        (batch, inputs_of(batch, own, ref))
        for batch, own, ref in zip(batches, scores, reference, strict=True)
    ]


def inputs_of(batch: PackedBatch, scores: Scores, reference: torch.Tensor | None) -> LossInputs:
    """`scores` are those of π_prox."""
    values = scores.get("values")
    return LossInputs(
        **scores,
        proximal_logprobs=scores["logprobs"].detach(),
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        sequence_ids=batch.sequence_ids,
        num_sequences=batch.num_sequences,
        version_lag=batch.version_lag,
        reference_logprobs=reference,
        old_values=None if values is None else values.detach(),
        labels=tuple(f"ticket {ticket}, response {i}" for ticket, i in batch.responses),
    )


def visit_part(
    b: Backend, part: Part, first: bool, recorder: TokenRecorder | None = None
) -> list[Metrics]:
    """Accumulates the gradient of one part; counts span it, so that its cut does not matter.

    Before the `first` update π_θ is π_prox: what has no gradient is not computed again, nor is a micro-batch
    that still has its graph. Of all of them graphs would take too much memory.
    """
    own = whole_step([x for batch, x in part if batch.counts], b.cfg.objective)
    totals = b.ranks.total(own)

    balance = None
    if b.cfg.router_aux_coef:
        done = [x.routed for batch, x in part if batch.counts and x.routed]
        balance = balance_weights(done, b.shape, b.ranks) * b.cfg.router_aux_coef

    def loss(batch: PackedBatch, before: LossInputs, scores: Scores):
        inputs = replace(before, **scores)
        out = loss_fn(
            inputs,
            b.cfg.objective,
            b.cfg.aggregation,
            totals,
            reference_kl=b.cfg.reference_kl,
            entropy_coef=b.cfg.entropy_coef,
            value=b.cfg.critic.value if b.cfg.critic else None,
            balance=balance if batch.counts else None,
        )
        if recorder and batch.counts:
            recorder.add(batch, before, inputs, out.policy_loss)
        return out.loss, out.metrics

    learning = [(batch, x) for batch, x in part if batch.learns]
    metrics: list[Metrics] = []
    if learning:
        made = _scores_of(learning[0][1])
        metrics += b.backward(
            [batch for batch, _ in learning],
            lambda i, scores: loss(*learning[i], scores),
            made if first and made["logprobs"].requires_grad else None,
        )
    others = [(batch, x) for batch, x in part if not batch.learns]
    if others:
        now = (
            [_scores_of(x) for _, x in others]
            if first
            else b.scores([batch for batch, _ in others])
        )
        with torch.no_grad():
            metrics += [
                loss(batch, x, scores)[1] for (batch, x), scores in zip(others, now, strict=True)
            ]
    counts = [batch.counts for batch, _ in learning + others]
    return [m for m, counted in zip(metrics, counts, strict=True) if counted]


def _scores_of(inputs: LossInputs) -> Scores:
    found = {name: getattr(inputs, name) for name in ("logprobs", "entropy", "values", "routed")}
    return {name: x for name, x in found.items() if x is not None}


def _update(b: Backend) -> Metrics:
    """A step of every optimizer on the gradient accumulated."""
    metrics, taken = b.update()
    b.updates += 1
    b.skipped += not taken
    b.skipped_in_row = 0 if taken else b.skipped_in_row + 1
    if b.skipped_in_row >= b.cfg.max_skipped:
        raise DivergedError(
            f"optimizer step {b.updates}: the gradient was not finite {b.skipped_in_row} times in "
            "a row (learner.max_skipped); a smaller learner.optimizer.lr may help"
        )
    return metrics
