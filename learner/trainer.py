"""One learner step: π_prox, then `epochs` passes over the batch, an optimizer step for each part of it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from areal_q.algorithms import LossInputs, loss_fn, reduce_metrics
from areal_q.algorithms.loss import whole_step
from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import KvScales, LearnerConfig
from areal_q.errors import DivergedError
from areal_q.models import Decoder
from areal_q.models.aligned import materialise
from areal_q.models.logprobs import head_logprobs
from areal_q.models.lora import adapters_off
from learner.advantages import needs_policy, with_advantages
from learner.batch import PackedBatch, Sample, pack
from learner.critic import Critic
from learner.kv_scales import kv_scales
from learner.optim import build_optimizer, learning_rate, optimizer_step
from learner.ranks import ALONE, Ranks, filler, reshard, summed
from learner.routing import balance_weights, routed, routing_for
from learner.tap import TokenTap

Part = list[tuple[PackedBatch, LossInputs]]
"""The micro-batches of one optimizer step"""


@dataclass
class Trainer:
    """The policy being learnt and its optimizer; a critic and a frozen reference where they are asked for."""

    model: Decoder
    cfg: LearnerConfig
    temperature: float
    """The rollouts' sampling temperature: log-probs on both sides are those of logits / temperature"""
    updates: int = 0
    """Optimizer steps tried since the run began"""
    skipped: int = 0
    """Of these, steps skipped because a gradient was not finite"""
    skipped_in_row: int = 0
    """Of these, the latest, without one taken since; a resumed run counts anew"""
    calibrate: KvScales | None = None
    """How to measure `kv_scales`; None: not at all"""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of an FP8 KV cache, for the weights after the last step; to be published with them"""
    ranks: Ranks = ALONE
    """With others, `model` is sharded over them (learner/sharded.py)"""
    tap: TokenTap | None = None
    """Keeps what the token log holds of a step"""
    before_write: Callable[[], None] = lambda: None
    """Called before the weights change: returns once nobody else reads them"""
    optimizer: torch.optim.Optimizer = field(init=False)
    critic: Critic | None = None
    reference: Decoder | None = None
    """Frozen; by default the policy as it is now. None with LoRA: the base is in the policy itself"""

    def __post_init__(self) -> None:
        cfg = self.cfg
        self.model.recompute_layers(cfg.recompute)
        if self.ranks.size == 1:  # a sharded model has its own way to compute in another type
            self.model.dtype = getattr(torch, cfg.dtype)
        self.optimizer = build_optimizer(self.model, cfg.optimizer)
        if cfg.critic and self.critic is None:
            self.critic = Critic(self.model, cfg.critic)
        if cfg.reference_kl and self.reference is None and not cfg.lora:
            self.reset_reference()

    def collect(self) -> None:
        """Called before all that a checkpoint holds is read."""

    def close(self) -> None:
        """Lets go of other processes, if there are any."""

    def reset_reference(self) -> None:
        """The present policy becomes the reference."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Learns from `samples`; returns the metrics. Deterministic in weights, samples and their order."""
        parts = self.prepare(samples)
        if self.tap:
            self.tap.begin()
        metrics: list[Metrics] = []
        for visit, part in enumerate(parts * self.cfg.epochs):
            metrics += self._backward(part, first=visit == 0)
            metrics.append(self._update())
        if self.calibrate:
            self.kv_scales = kv_scales(self.model, samples, self.calibrate, self.cfg.device)
        values = reduce_metrics(self.ranks.metrics(metrics))
        values["train/loss"] = values["loss/total"] / (len(parts) * self.cfg.epochs)
        values["train/lr"] = self.optimizer.param_groups[0]["lr"]
        values["train/skipped_steps"] = self.skipped
        return values

    def prepare(self, samples: Sequence[Sample]) -> list[Part]:
        """One part for every optimizer step. All of π_prox before the first update: it is the policy just
        before this batch changes it."""
        size = -(-len(samples) // self.cfg.minibatches)
        cuts = (samples[i : i + size] for i in range(0, len(samples), size))
        parts = [self._part(cut, number == 0) for number, cut in enumerate(cuts)]
        if needs_policy(self.cfg):
            found = with_advantages([x for part in parts for _, x in part], samples, self.cfg)
            each = iter(found)
            parts = [[(batch, next(each)) for batch, _ in part] for part in parts]
        return parts

    @property
    def _all_learn(self) -> bool:
        """Whether a response has a gradient even without an advantage."""
        cfg = self.cfg
        return bool(cfg.critic or cfg.reference_kl or cfg.entropy_coef or cfg.router_aux_coef)

    def _part(self, samples: Sequence[Sample], first: bool) -> Part:
        """Micro-batches with a gradient and without are apart: those of no advantage need no backward."""
        useful = [sample for sample in samples if sample.advantage or self._all_learn]
        others = [sample for sample in samples if not (sample.advantage or self._all_learn)]
        batches = [
            pack(cut or [filler(samples[0])], self.cfg.device, learns, counts=bool(cut))
            for kind, learns in ((useful, True), (others, False))
            for cut in self.ranks.cuts(kind, self.cfg.microbatch_tokens)
        ]
        # A sharded model's graph would not survive the forwards that follow.
        graph = first and self.ranks.size == 1
        return [
            (batch, self._inputs(batch, graph=graph and number == 0))
            for number, batch in enumerate(batches)
        ]

    def _inputs(self, batch: PackedBatch, graph: bool) -> LossInputs:
        """The loss's inputs before the update, where π_θ is still π_prox; with the `graph` of a forward
        that need not be repeated."""
        with torch.set_grad_enabled(graph and batch.learns):
            scores = self._scores(batch)
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(self.reference, batch, self.temperature)
        elif self.cfg.reference_kl:
            with torch.no_grad(), adapters_off(self.model):
                reference, _ = token_logprobs(self.model, batch, self.temperature)
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

    def _scores(self, batch: PackedBatch) -> dict[str, Any]:
        """What the model, and the critic, say about each response token now."""
        routing = routing_for(self.model, batch, self.cfg.routing_replay)
        hidden = self.model(batch.token_ids, batch.layout, routing)[batch.predict]
        bonus = self.cfg.entropy_coef > 0
        logprobs, entropy = logprobs_of(self.model, hidden, batch, self.temperature, bonus)
        scores: dict[str, Any] = {"logprobs": logprobs, "entropy": entropy}
        if routing is not None:
            scores["routed"] = routed(routing, batch, self.model.config)
        if self.critic is not None:
            scores["values"] = self.critic(hidden, batch)
        return scores

    def _backward(self, part: Part, first: bool) -> list[Metrics]:
        """Accumulates the gradient of one part; counts span it, so that its cut does not matter.

        Before the `first` update π_θ is π_prox: what has no gradient is not computed again, nor is the
        first micro-batch. Of the others the graphs would take too much memory.
        """
        own = whole_step([x for batch, x in part if batch.counts], self.cfg.objective)
        totals = self.ranks.total(own)
        balance = None
        if self.cfg.router_aux_coef:
            done = [x.routed for batch, x in part if batch.counts and x.routed]
            balance = balance_weights(done, self.model.config, self.ranks)
            balance *= self.cfg.router_aux_coef
        metrics = []
        for batch, before in part:
            inputs = before
            with torch.set_grad_enabled(batch.learns):
                if not first or (batch.learns and not before.logprobs.requires_grad):
                    inputs = replace(inputs, **self._scores(batch))
                out = loss_fn(
                    inputs,
                    self.cfg.objective,
                    self.cfg.aggregation,
                    totals,
                    reference_kl=self.cfg.reference_kl,
                    entropy_coef=self.cfg.entropy_coef,
                    value=self.cfg.critic.value if self.cfg.critic else None,
                    balance=balance if batch.counts else None,
                )
            if batch.learns:
                summed(out.loss, self.ranks).backward()
            if not batch.counts:
                continue
            if self.tap:
                self.tap.add(batch, before, inputs, out.surrogate)
            metrics.append(out.metrics)
        return metrics

    def _update(self) -> Metrics:
        """A step of every optimizer on the gradient accumulated."""
        self.before_write()
        if self.ranks.size > 1:
            reshard(self.model)
        bound = self.cfg.max_grad_norm
        lr = learning_rate(self.cfg.optimizer, self.updates)
        norm, taken = optimizer_step(self.model, self.optimizer, lr, bound)
        metrics: Metrics = {"train/grad_norm": Mean(norm, 1)}
        if self.critic is not None:
            lr = learning_rate(self.critic.cfg.optimizer, self.updates)
            norm, also = optimizer_step(self.critic, self.critic.optimizer, lr, bound)
            metrics["value/grad_norm"] = Mean(norm, 1)
            taken = taken and also
        if self.cfg.precision != "full":
            materialise(self.model)
        self.updates += 1
        self.skipped += not taken
        self.skipped_in_row = 0 if taken else self.skipped_in_row + 1
        if self.skipped_in_row >= self.cfg.max_skipped:
            raise DivergedError(
                f"optimizer step {self.updates}: the gradient was not finite {self.skipped_in_row} times in "
                "a row (learner.max_skipped); a smaller learner.optimizer.lr may help"
            )
        return metrics


def token_logprobs(
    model: Decoder, batch: PackedBatch, temperature: float, replay: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each response token, and entropy of its distribution (no gradient); float32 [T] nats.

    Only the positions that predict a response token reach the output head. With `replay`, experts are those
    recorded.
    """
    routing = routing_for(model, batch, replay)
    hidden = model(batch.token_ids, batch.layout, routing)[batch.predict]
    return logprobs_of(model, hidden, batch, temperature)


def logprobs_of(
    model: Decoder,
    hidden: torch.Tensor,
    batch: PackedBatch,
    temperature: float,
    entropy_learns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the hidden states [T, D] that predict the response tokens; the entropy has a gradient
    where it `entropy_learns`."""
    return head_logprobs(hidden, model.head, batch.targets, temperature, entropy_learns)
