"""The policy update of one learner step, on any backend.

    update_policy ─▶ prepare_minibatches   π_prox, the reference, advantages: all before the first update
                  └▶ for every epoch, for every minibatch:
                       first_gradient, later_gradient   loss and gradient, micro-batch by micro-batch
                       _step_optimizer                  clip and step, unless the gradient is not finite

A batch is cut into minibatches, one for each optimizer step, and these into micro-batches, which bound memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, learns_without_advantage, loss_fn, reduce_metrics
from areal_q.algorithms.kl import taught
from areal_q.algorithms.loss import whole_step
from areal_q.algorithms.ratios import interpolated_proximal
from areal_q.algorithms.reducers import Metrics
from areal_q.config import Gae, LearnerConfig
from areal_q.errors import ConfigError, DivergedError
from learner.backends.base import Backend, Scores
from learner.backends.routing_replay import balance_weights
from learner.backends.single_device import TorchPolicy
from learner.data.packing import PackedBatch, Sample, masked, pack_samples, paths_of
from learner.measure.token_recorder import TokenRecorder
from learner.optim.build import learning_rate
from learner.policy_advantages import with_advantages

MICROBATCH = "train/microbatch_tokens"
"""The metric that records the size of micro-batches. If a resumed run changes it, sums round differently, which
a replay must know."""
_CUTS, _FEWEST = 2, 2048
"""Micro-batches for each thread, where several are computed at once, and the tokens below which a minibatch is
not cut for it: a pass over a thousand tokens takes as long for Python as for the processor."""
Minibatch = list[tuple[PackedBatch, LossInputs]]
"""The micro-batches of one optimizer step, those with a gradient first, each with the inputs of its loss from
before the update."""


class PolicyUpdater(Protocol):
    """Updates rank 0's whole policy: this process alone, or all ranks together (learner/multi_process.py)."""

    policy: TorchPolicy
    """The whole policy, as this process holds it."""

    @property
    def shares(self) -> int:
        """Number of other ranks that write a share of a checkpoint themselves."""
        ...

    def update(
        self, samples: Sequence[Sample], recorder: TokenRecorder | None = None
    ) -> dict[str, float]:
        """Learns from `samples`, after which `policy` has the new weights; returns the metrics by name."""
        ...

    def collect(self, staged: Path | None = None) -> dict[str, Tensor]:
        """Copies the critic into `policy`, and returns the moments that it does not hold, by their names in a
        checkpoint. If a directory `staged` is given, they are this rank's share, and the other ranks write
        theirs there."""
        ...

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy, on every rank."""
        ...

    def close(self) -> None:
        """Ends the other processes, if there are any."""
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
    backend: Backend, samples: Sequence[Sample], recorder: TokenRecorder | None = None
) -> dict[str, float]:
    """Learns from `samples` and returns the metrics by name.

    The result depends on the weights, the samples and their order alone. `recorder` collects the tokens for the
    token log. All ranks call this together. Raises what `prepare_minibatches` and `minibatch_loss` raise, and
    DivergedError after `learner.max_skipped` gradients in a row that were not finite.
    """
    minibatches = prepare_minibatches(backend, samples, defer=backend.cfg.update_scores_itself)
    if recorder:
        recorder.begin(
            [batch for minibatch in minibatches for batch, _ in minibatch if batch.counts]
        )
    metrics: list[Metrics] = []
    for number, minibatch in enumerate(minibatches * backend.cfg.epochs):
        accumulate = later_gradient if number else first_gradient
        metrics += accumulate(backend, minibatch, recorder)
        metrics.append(_step_optimizer(backend))
    values = reduce_metrics(backend.ranks.metrics(metrics))
    values["train/loss"] = values["loss/total"] / (len(minibatches) * backend.cfg.epochs)
    for name in values:
        if name.endswith("/tokens"):  # which every epoch counts again
            values[name] /= backend.cfg.epochs
    values["train/lr"] = learning_rate(backend.cfg.optimizer, backend.updates - 1)
    values[MICROBATCH] = backend.cfg.pass_tokens
    values["train/skipped_steps"] = backend.skipped
    return values


def prepare_minibatches(
    backend: Backend, samples: Sequence[Sample], defer: bool = False
) -> list[Minibatch]:
    """Returns one minibatch for each optimizer step of an epoch.

    π_prox is computed for all of them before the first update, since it is the policy before this batch changes
    it. With `defer`, scores are left out where the first update's own forward pass gives them. Raises
    ConfigError for a sample that has more tokens than a micro-batch may have.
    """
    longest = max(samples, key=lambda sample: sample.num_tokens)
    if longest.num_tokens > backend.cfg.pass_tokens:
        raise ConfigError(
            f"{backend.cfg.pass_limit}: ticket {longest.ticket}, response "
            f"{longest.trajectory.index} has {longest.num_tokens} tokens, its prompt's included"
        )
    packed = [_microbatches(backend, cut) for cut in cut_minibatches(samples, backend.cfg)]
    loglinear = backend.cfg.proximal == "loglinear"
    # Only the first minibatch is learnt from before the weights change, so that only its graph stays valid.
    minibatches = [
        _with_scores(backend, cuts, graph=n == 0, defer=defer and (n == 0 or loglinear))
        for n, cuts in enumerate(packed)
    ]
    if not backend.cfg.advantages_need_policy:
        return minibatches
    own = [sample for cuts in packed for cut, batch in cuts if batch.counts for sample in cut]
    inputs = [x for minibatch in minibatches for batch, x in minibatch if batch.counts]
    each = iter(with_advantages(inputs, own, backend.cfg, backend.ranks.add))
    return [
        [
            (batch, next(each) if batch.counts else replace(x, returns=x.old_values))
            for batch, x in minibatch
        ]
        for minibatch in minibatches
    ]


def cut_minibatches(samples: Sequence[Sample], cfg: LearnerConfig) -> list[list[Sample]]:
    """Cuts `samples` into at most `cfg.minibatches` lists of equally many responses, all paths of an episode in
    one; the last may have fewer.

    If advantages within groups are still to be computed, a rank must have whole groups: then the lists have
    equally many groups instead, some of which may lack responses that could not be scored.
    """
    if cfg.advantages_need_policy and not isinstance(cfg.advantage, Gae):
        groups = groupby(samples, key=lambda sample: sample.ticket)
        units = [list(members) for _, members in groups]
    else:
        starts = [i for i, sample in enumerate(samples) if not sample.branch]
        ends = [*starts[1:], len(samples)]
        units = [list(samples[a:b]) for a, b in zip(starts, ends, strict=True)]
    size = -(-len(units) // cfg.minibatches)
    return [list(chain(*units[i : i + size])) for i in range(0, len(units), size)]


def _microbatches(
    backend: Backend, samples: Sequence[Sample]
) -> list[tuple[Sequence[Sample], PackedBatch]]:
    """Returns this rank's micro-batches of one minibatch, each with its samples. Samples without a gradient are
    packed separately, as they need no backward pass."""
    cfg = backend.cfg
    more = cfg.critic or cfg.reference_kl or cfg.entropy_coef or cfg.router_aux_coef or cfg.teacher
    all_learn = bool(more or learns_without_advantage(cfg.objective))
    useful = [sample for sample in samples if all_learn or sample.learns]
    others = [sample for sample in samples if not (all_learn or sample.learns)]
    paths = paths_of(backend.shape)
    return [
        (
            cut,
            pack_samples(cut or [masked(samples[0])], backend.cfg.device, learns, counts=bool(cut)),
        )
        for kind, learns in ((useful, True), (others, False))
        for cut in backend.ranks.cuts(kind, _most_tokens(backend, kind), paths)
    ]


def _most_tokens(backend: Backend, samples: Sequence[Sample]) -> int:
    """Returns the most tokens of one of the micro-batches of `samples`. Those that are computed at once share
    `learner.microbatch_tokens`; there are several for each thread, so that none waits long for the last."""
    most, parallel = backend.cfg.pass_tokens, backend.parallel
    total = sum(sample.own_tokens for sample in samples)
    cuts = min(total // _FEWEST, _CUTS * parallel)
    if parallel == 1 or cuts < 2:
        return most
    longest = max(sample.num_tokens for sample in samples)
    return min(most // parallel, total // cuts + longest)


def _with_scores(
    backend: Backend,
    packed: Sequence[tuple[Sequence[Sample], PackedBatch]],
    graph: bool,
    defer: bool,
) -> Minibatch:
    """Returns the micro-batches with the inputs of their losses, computed while π_θ is still π_prox. With
    `defer`, those that learn have the recorded log-probs in place of scores, until their update computes them:
    finite where the record is, so that tokens can be counted before."""
    batches = [batch for _, batch in packed]
    now = [batch for batch in batches if not (defer and batch.learns)]
    found = iter(backend.scores(now, graph) if now else [])
    scores = [
        {"logprobs": batch.behavior_logprobs, "entropy": batch.behavior_logprobs}
        if defer and batch.learns
        else next(found)
        for batch in batches
    ]
    reference = backend.reference_logprobs(batches)
    return [
        (batch, loss_inputs(batch, own, ref))
        for batch, own, ref in zip(batches, scores, reference, strict=True)
    ]


def _scored(before: LossInputs, scores: Scores) -> LossInputs:
    """Returns `before` with log-probs, also those of π_prox, and entropies from `scores`, without gradient."""
    own, entropy = scores["logprobs"].detach(), scores["entropy"].detach()
    return replace(before, logprobs=own, proximal_logprobs=own, entropy=entropy)


def loss_inputs(batch: PackedBatch, scores: Scores, reference: torch.Tensor | None) -> LossInputs:
    """Returns the loss's inputs of one micro-batch. `scores` are those of π_prox, `reference` is log π_ref
    [T]."""
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
        teacher_logprobs=batch.teacher_logprobs,
        old_values=None if values is None else values.detach(),
        share=batch.share,
        labels=tuple(
            f"ticket {ticket}, response {i}{f', branch {branch}' if branch else ''}"
            for ticket, i, branch in batch.responses
        ),
    )


def first_gradient(
    backend: Backend, minibatch: Minibatch, recorder: TokenRecorder | None = None
) -> list[Metrics]:
    """Accumulates the gradient of a step's first update, before which π_θ is π_prox, and returns the metrics of
    the micro-batches.

    The forward pass gives the scores that are still missing, and `minibatch` keeps them for later epochs. If
    they were computed before, the pass is repeated for micro-batches with a gradient only, and not for the
    first of these, whose graph was kept. Keeping all graphs would take too much memory.
    """
    loss_of = minibatch_loss(backend, minibatch, recorder)

    def loss(place: int, scores: Scores) -> tuple[Tensor, Metrics]:
        batch, before = minibatch[place]
        if backend.cfg.update_scores_itself and batch.learns:
            before = _scored(before, scores)
            minibatch[place] = batch, before
        return loss_of(batch, before, scores)

    learning, others = _parted(minibatch)
    metrics: list[Metrics] = []
    if learning:
        kept = _scores_of(learning[0][1])
        graph = kept if kept["logprobs"].requires_grad else None
        metrics = backend.backward([batch for batch, _ in learning], loss, graph)
    with torch.no_grad():
        for place, (_, before) in enumerate(others, len(learning)):
            metrics.append(loss(place, _scores_of(before))[1])
    return [m for m, (batch, _) in zip(metrics, minibatch, strict=True) if batch.counts]


def later_gradient(
    backend: Backend, minibatch: Minibatch, recorder: TokenRecorder | None = None
) -> list[Metrics]:
    """Accumulates the gradient of any other update of a step, before which π_θ has moved away from π_prox, and
    returns the metrics of the micro-batches."""
    loss_of = minibatch_loss(backend, minibatch, recorder)

    def loss(place: int, scores: Scores) -> tuple[Tensor, Metrics]:
        batch, before = minibatch[place]
        if backend.cfg.proximal == "loglinear":
            before = _scored(before, scores)
            given = before.logprobs, before.behavior_logprobs, before.version_lag
            before = replace(before, proximal_logprobs=interpolated_proximal(*given))
        return loss_of(batch, before, scores)

    learning, others = _parted(minibatch)
    metrics: list[Metrics] = []
    if learning:
        metrics = backend.backward([batch for batch, _ in learning], loss)
    if others:
        now = backend.scores([batch for batch, _ in others])
        with torch.no_grad():
            metrics += [loss(place, scores)[1] for place, scores in enumerate(now, len(learning))]
    return [m for m, (batch, _) in zip(metrics, minibatch, strict=True) if batch.counts]


def _parted(minibatch: Minibatch) -> tuple[Minibatch, Minibatch]:
    """Returns the micro-batches with a gradient and, behind them in `minibatch`, those without one."""
    learning = sum(batch.learns for batch, _ in minibatch)
    return minibatch[:learning], minibatch[learning:]


def minibatch_loss(
    backend: Backend, minibatch: Minibatch, recorder: TokenRecorder | None = None
) -> Callable[[PackedBatch, LossInputs, Scores], tuple[Tensor, Metrics]]:
    """Returns a function that returns loss and metrics of one micro-batch of `minibatch`, from its inputs of
    before the update and its present scores.

    Losses are divided by counts of the whole minibatch, so that the gradient does not depend on the cut into
    micro-batches. Collective. The function raises RecordError, naming ticket, response and token, if an input
    of the loss is not finite.
    """
    cfg = backend.cfg
    counted = [inputs for batch, inputs in minibatch if batch.counts]
    totals = backend.ranks.total(whole_step(counted, cfg.objective))
    balance = None
    if cfg.router_aux_coef:
        routed = [inputs.routed for inputs in counted if inputs.routed]
        weights = balance_weights(routed, backend.shape, backend.ranks, cfg.device)
        balance = weights * cfg.router_aux_coef

    def loss(batch: PackedBatch, before: LossInputs, scores: Scores) -> tuple[Tensor, Metrics]:
        inputs, told = replace(before, **scores), {}
        if cfg.teacher:
            inputs, told = taught(inputs, cfg.teacher)
        out = loss_fn(
            inputs,
            cfg.objective,
            cfg.aggregation,
            totals,
            reference_kl=cfg.reference_kl,
            entropy_coef=cfg.entropy_coef,
            value=cfg.critic.value if cfg.critic else None,
            balance=balance if batch.counts else None,
        )
        if recorder and batch.counts:
            recorder.add(batch, before, inputs, out.policy_loss)
        return out.loss, out.metrics | told

    return loss


def _scores_of(inputs: LossInputs) -> Scores:
    scores = {name: getattr(inputs, name) for name in ("logprobs", "entropy", "values", "routed")}
    return {name: x for name, x in scores.items() if x is not None}


def _step_optimizer(backend: Backend) -> Metrics:
    """Takes a step of every optimizer on the accumulated gradient. Raises DivergedError after too many steps in
    a row whose gradient was not finite."""
    metrics, stepped = backend.step_optimizer()
    backend.updates += 1
    backend.skipped += not stepped
    backend.skipped_in_row = 0 if stepped else backend.skipped_in_row + 1
    if backend.skipped_in_row >= backend.cfg.max_skipped:
        raise DivergedError(
            f"optimizer step {backend.updates}: the gradient was not finite {backend.skipped_in_row} times in "
            "a row (learner.max_skipped); a smaller learner.optimizer.lr may help"
        )
    return metrics
