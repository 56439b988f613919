"""One learner step: π_prox, advantages, `updates` optimizer steps on parts of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from areal_q.algorithms import LossInputs, MetricSums, Totals, loss_fn, reduce_metrics
from areal_q.config import LearnerConfig
from areal_q.models import Decoder
from learner.batch import PackedBatch, Sample, microbatches, pack
from learner.optim import build_optimizer, learning_rate, optimizer_step


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
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(self.model, self.cfg.optimizer)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Learns from `samples`; returns the step's metrics. Deterministic in weights, samples and order."""
        size = -(-len(samples) // self.cfg.updates)
        parts = [
            [pack(cut, self.cfg.device) for cut in self._cut(samples[i : i + size])]
            for i in range(0, len(samples), size)
        ]
        # All of π_prox before the first update: it is the policy just before this batch changes it.
        proximal = [[self.logprobs(batch)[0] for batch in part] for part in parts]
        sums: list[MetricSums] = []
        norms: list[float] = []
        for part, prox in zip(parts, proximal, strict=True):
            sums += self._backward(part, prox)
            lr = learning_rate(self.cfg.optimizer, self.updates)
            norm, taken = optimizer_step(self.model, self.optimizer, lr, self.cfg.max_grad_norm)
            self.updates += 1
            self.skipped += not taken
            norms.append(norm)
        metrics = reduce_metrics(sums)
        metrics["train/grad_norm"] = sum(norms) / len(norms)
        metrics["train/lr"] = lr
        metrics["train/skipped_steps"] = self.skipped
        return metrics

    def _cut(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        return list(microbatches(samples, self.cfg.microbatch_tokens))

    def _backward(self, part: list[PackedBatch], proximal: list[torch.Tensor]) -> list[MetricSums]:
        """Accumulates the gradient of one part; counts span it, so its cut does not matter."""
        totals = Totals(
            tokens=int(sum(int(b.mask.sum()) for b in part)),
            sequences=sum(b.num_sequences for b in part),
        )
        sums = []
        for batch, prox in zip(part, proximal, strict=True):
            logprobs, entropy = token_logprobs(self.model, batch, self.temperature)
            out = loss_fn(
                LossInputs(
                    logprobs=logprobs,
                    proximal_logprobs=prox,
                    behavior_logprobs=batch.behavior_logprobs,
                    advantages=batch.advantages,
                    mask=batch.mask,
                    sequence_ids=batch.sequence_ids,
                    num_sequences=batch.num_sequences,
                    version_lag=batch.version_lag,
                    entropy=entropy,
                ),
                self.cfg,
                totals,
            )
            out.loss.backward()
            sums.append(out.metrics)
        return sums

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies [T] of the response tokens under the present weights."""
        return token_logprobs(self.model, batch, self.temperature)


def token_logprobs(
    model: Decoder, batch: PackedBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each response token and entropy of its distribution, float32 [T] nats.

    Only the positions that predict a response token reach the output head.
    """
    hidden = model(batch.token_ids, batch.layout)
    logits = model.logits(hidden[batch.predict]).float() / temperature
    logp = nn.functional.log_softmax(logits, dim=-1)
    chosen = logp.gather(-1, batch.targets[:, None]).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy
