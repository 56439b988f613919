"""One learner step: π_prox, then `epochs` passes over the batch, an optimizer step for each part of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from areal_q.algorithms import LossInputs, loss_fn, reduce_metrics
from areal_q.algorithms.loss import whole_step
from areal_q.algorithms.reducers import Metrics
from areal_q.config import LearnerConfig
from areal_q.models import Decoder
from learner.batch import PackedBatch, Sample, microbatches, pack
from learner.optim import build_optimizer, learning_rate, optimizer_step
from learner.tap import TokenTap

Part = list[tuple[PackedBatch, LossInputs]]
"""The micro-batches of one optimizer step"""


@dataclass
class Trainer:
    """The policy being learnt and its optimizer."""

    model: Decoder
    cfg: LearnerConfig
    temperature: float
    """The rollouts' sampling temperature: log-probs on both sides are those of logits / temperature"""
    updates: int = 0
    """Optimizer steps tried since the run began"""
    skipped: int = 0
    """Of these, steps skipped because the gradient was not finite"""
    tap: TokenTap | None = None
    """Keeps what the token log holds of a step"""
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.cfg.optimizer)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Learns from `samples`; returns the metrics. Deterministic in weights, samples and their order."""
        parts = self.prepare(samples)
        if self.tap:
            self.tap.begin()
        metrics: list[Metrics] = []
        norms: list[float] = []
        for visit, part in enumerate(parts * self.cfg.epochs):
            lr = learning_rate(self.cfg.optimizer, self.updates)
            metrics += self._backward(part, first=visit == 0)
            norm, taken = optimizer_step(self.model, self.optimizer, lr, self.cfg.max_grad_norm)
            norms.append(norm)
            self.updates += 1
            self.skipped += not taken
        values = reduce_metrics(metrics)
        values["train/loss"] = values["loss/total"] / len(norms)
        values["train/grad_norm"] = sum(norms) / len(norms)
        values["train/lr"] = self.optimizer.param_groups[0]["lr"]
        values["train/skipped_steps"] = self.skipped
        return values

    def prepare(self, samples: Sequence[Sample]) -> list[Part]:
        """One part for every optimizer step. All of π_prox before the first update: it is the policy just
        before this batch changes it."""
        size = -(-len(samples) // self.cfg.minibatches)
        return [self._part(samples[i : i + size], i == 0) for i in range(0, len(samples), size)]

    def _part(self, samples: Sequence[Sample], first: bool) -> Part:
        """Micro-batches with a gradient and without are apart: those of no advantage need no backward."""
        useful = [sample for sample in samples if sample.advantage]
        others = [sample for sample in samples if not sample.advantage]
        cuts = [
            cut
            for kind in (useful, others)
            for cut in microbatches(kind, self.cfg.microbatch_tokens)
        ]
        return [
            (batch, self._inputs(batch, graph=first and number == 0))
            for number, batch in enumerate(pack(cut, self.cfg.device) for cut in cuts)
        ]

    def _inputs(self, batch: PackedBatch, graph: bool) -> LossInputs:
        """The loss's inputs before the update, where π_θ is still π_prox; with the `graph` of a forward
        that need not be repeated."""
        with torch.set_grad_enabled(graph and batch.learns):
            logprobs, entropy = token_logprobs(self.model, batch, self.temperature)
        return LossInputs(
            logprobs=logprobs,
            proximal_logprobs=logprobs.detach(),
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            mask=batch.mask,
            sequence_ids=batch.sequence_ids,
            num_sequences=batch.num_sequences,
            version_lag=batch.version_lag,
            entropy=entropy,
        )

    def _backward(self, part: Part, first: bool) -> list[Metrics]:
        """Accumulates the gradient of one part; counts span it, so that its cut does not matter.

        Before the `first` update π_θ is π_prox: what has no gradient is not computed again, nor is the
        first micro-batch. Of the others the graphs would take too much memory.
        """
        totals = whole_step([inputs for _, inputs in part], self.cfg.objective)
        metrics = []
        for number, (batch, before) in enumerate(part):
            inputs = before
            with torch.set_grad_enabled(batch.learns):
                if not first or (batch.learns and number > 0):
                    logprobs, entropy = token_logprobs(self.model, batch, self.temperature)
                    inputs = replace(inputs, logprobs=logprobs, entropy=entropy)
                out = loss_fn(inputs, self.cfg.objective, self.cfg.aggregation, totals)
            if self.tap:
                self.tap.add(batch, before, inputs, out.surrogate)
            if batch.learns:
                out.loss.backward()
            metrics.append(out.metrics)
        return metrics


def token_logprobs(
    model: Decoder, batch: PackedBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each response token, and entropy of its distribution (no gradient); float32 [T] nats.

    Only the positions that predict a response token reach the output head.
    """
    hidden = model(batch.token_ids, batch.layout)
    logits = model.logits(hidden[batch.predict]).float() / temperature
    logp = nn.functional.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, batch.targets[:, None]).squeeze(-1), entropy
