"""The backend in torch: a policy and its optimizer on one device, or a shard of it
(learner/backends/fsdp.py)."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import KvScales, LearnerConfig
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.logprobs import head_logprobs
from areal_q.models.low_bit.lora import adapters_off
from areal_q.models.low_bit.quantized_forward import materialise
from areal_q.quant.sticky_scales import StickyRanges
from learner.backends.base import LossOf, Scores
from learner.backends.critic import Critic
from learner.backends.data_parallel import ALONE, Ranks, reshard, summed
from learner.backends.kv_calibration import kv_scales
from learner.backends.routing_replay import routed, routing_for
from learner.data.packing import PackedBatch, Sample
from learner.optim.build import build_optimizer, learning_rate, optimizer_step


@dataclass
class TorchPolicy:
    """The policy being learnt and its optimizer; a critic and a frozen reference where they are asked for."""

    model: Decoder
    cfg: LearnerConfig
    temperature: float
    """The rollouts' sampling temperature: log-probs on both sides are those of logits / temperature."""
    updates: int = 0
    """Number of optimizer steps tried since the run began."""
    skipped: int = 0
    """Number of these that were skipped because a gradient was not finite."""
    skipped_in_row: int = 0
    """Number of steps skipped since the last one that was taken; a resumed run counts anew."""
    calibrate: KvScales | None = None
    """How to measure `kv_scales`; None: they are not measured."""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scales of an FP8 KV cache, for the weights after the last step; to be published with them."""
    sticky: StickyRanges | None = None
    """Ranges of the version published last if scales are sticky; they are the publisher's, kept here for
    checkpoints."""
    ranks: Ranks = ALONE
    """The ranks that learn together; with others, `model` is sharded over them (learner/backends/fsdp.py)."""
    before_write: Callable[[], None] = lambda: None
    """Called before the weights change; returns once nobody else reads them."""
    optimizer: torch.optim.Optimizer = field(init=False)
    critic: Critic | None = None
    reference: Decoder | None = None
    """The frozen reference policy, by default the policy as it is now. None with LoRA: the base is in the
    policy."""

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

    def calibrate_kv_scales(self, samples: Sequence[Sample]) -> None:
        """Measures the KV cache's scales for the present weights on `samples`, if that is asked for."""
        if self.calibrate:
            self.kv_scales = kv_scales(self.model, samples, self.calibrate, self.cfg.device)

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    @property
    def shape(self) -> DecoderConfig:
        return self.model.config

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        # A sharded model's graph would not survive the forwards that follow.
        graph = graph and self.ranks.size == 1
        scores = []
        for number, batch in enumerate(batches):
            with torch.set_grad_enabled(graph and number == 0 and batch.learns):
                scores.append(self._scores(batch))
        return scores

    @torch.no_grad()
    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor | None]:
        if self.reference is not None:
            return [token_logprobs(self.reference, batch, self.temperature)[0] for batch in batches]
        if not self.cfg.reference_kl:
            return [None] * len(batches)
        with adapters_off(self.model):
            return [token_logprobs(self.model, batch, self.temperature)[0] for batch in batches]

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, first_scores: Scores | None = None
    ) -> list[Metrics]:
        metrics = []
        for number, batch in enumerate(batches):
            scores = first_scores if number == 0 and first_scores else self._scores(batch)
            loss, measured = loss_of(number, scores)
            summed(loss, self.ranks).backward()
            metrics.append(measured)
        return metrics

    def _scores(self, batch: PackedBatch) -> Scores:
        """Returns the present scores of the model, and of the critic, for each response token."""
        routing = routing_for(self.model, batch, self.cfg.routing_replay)
        hidden = self.model(batch.token_ids, batch.layout, routing)[batch.predict]
        bonus = self.cfg.entropy_coef > 0
        logprobs, entropy = logprobs_of(self.model, hidden, batch, self.temperature, bonus)
        scores: Scores = {"logprobs": logprobs, "entropy": entropy}
        if routing is not None:
            scores["routed"] = routed(routing, batch, self.model.config)
        if self.critic is not None:
            scores["values"] = self.critic(hidden, batch)
        return scores

    def step_optimizer(self) -> tuple[Metrics, bool]:
        self.before_write()
        if self.ranks.size > 1:
            for module in (self.model, self.critic, self.reference):
                if module is not None:
                    reshard(module)
        bound = self.cfg.max_grad_norm
        lr = learning_rate(self.cfg.optimizer, self.updates)
        norm, stepped = optimizer_step(self.model, self.optimizer, lr, bound)
        metrics: Metrics = {"train/grad_norm": Mean(norm, 1)}
        if self.critic is not None:
            lr = learning_rate(self.critic.cfg.optimizer, self.updates)
            norm, critic_stepped = optimizer_step(self.critic, self.critic.optimizer, lr, bound)
            metrics["value/grad_norm"] = Mean(norm, 1)
            stepped = stepped and critic_stepped
        if self.cfg.precision != "full":
            materialise(self.model)
        return metrics, stepped


def token_logprobs(
    model: Decoder, batch: PackedBatch, temperature: float, replay: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-prob of each response token, and the entropy of its distribution (no gradient); float32
    [T] nats.

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
    """Returns what `token_logprobs` does, from the hidden states [T, D] that predict the response tokens; the
    entropy has a gradient where it `entropy_learns`."""
    return head_logprobs(hidden, model.head, batch.targets, temperature, entropy_learns)
