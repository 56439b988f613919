"""The torch backend: a policy with its optimizer on one device, or one rank's shard
(learner/backends/fsdp.py)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch

from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import KvScales, LearnerConfig
from areal_q.models import Decoder, DecoderConfig, PackedLayout
from areal_q.models.low_bit.lora import adapters_off
from areal_q.models.low_bit.quantized_forward import fold, materialise
from areal_q.models.smoothed_state import measured_inputs
from areal_q.quant.rescaling import Fold
from areal_q.quant.smoothing import SmoothingScales
from areal_q.quant.sticky_scales import StickyRanges
from learner.backends.base import LossOf, Scores
from learner.backends.calibration import first_of, kv_scales
from learner.backends.context_parallel import scores_over
from learner.backends.critic import Critic
from learner.backends.data_parallel import ALONE, Ranks, reshard
from learner.backends.microbatch_threads import MicrobatchThreads
from learner.backends.routing_replay import routed, routing_for
from learner.data.packing import PackedBatch, Sample, pack_samples
from learner.optim.build import build_optimizer, learning_rate, optimizer_step

SMALL = 1 << 23
"""Most weights of a model whose micro-batches are computed side by side, each with a gradient of its own, of at
most 32 MiB. A larger one's products are large enough for each to be divided between the threads."""


@dataclass
class TorchPolicy:
    """The policy that is learnt and its optimizer, with a critic and a frozen reference if the settings ask for
    them."""

    model: Decoder
    cfg: LearnerConfig
    temperature: float
    """The rollouts' sampling temperature; log-probs on both sides are those of logits / temperature."""
    updates: int = 0
    """Number of optimizer steps tried since the run began."""
    skipped: int = 0
    """Number of optimizer steps that were skipped because a gradient was not finite."""
    skipped_in_row: int = 0
    """Number of steps skipped since the last one that was taken; a resumed run counts anew."""
    calibrate: KvScales | None = None
    """Settings for measuring `kv_scales`; None does not measure them."""
    kv_scales: dict[str, torch.Tensor] = field(default_factory=dict)
    """Scales of an FP8 KV cache for the weights after the last step, float32 [1] each; published with them."""
    sticky: StickyRanges | None = None
    """The ranges of the version published last, if scales are sticky. The publisher changes them; checkpoints
    read them here."""
    smoothing: SmoothingScales | None = None
    """The scales by channel with which the weights are published, if activations are smoothed."""
    ranks: Ranks = ALONE
    """The ranks among which the samples are divided. With others `model` is sharded over them, and over those
    of `context` (learner/backends/fsdp.py)."""
    context: Ranks = ALONE
    """The ranks that share the tokens of each micro-batch."""
    readers: list[Callable[[], None]] = field(default_factory=list)
    """Functions that return once their thread reads weights and moments no more; each is called before these
    change: WeightPublisher.wait_until_read and CheckpointWriter.wait_until_read."""
    threads: MicrobatchThreads = field(init=False)
    """The threads that compute micro-batches at the same time."""
    critic: Critic | None = None
    reference: Decoder | None = None
    """The frozen reference policy, by default a copy of the policy at the start. It is None with LoRA, whose
    base is the reference."""

    def __post_init__(self) -> None:
        cfg = self.cfg
        self.model.recompute_layers(cfg.recompute)
        if not self.sharded:  # FSDP2 itself casts a sharded model to `cfg.products`
            self.model.dtype = getattr(torch, cfg.products)
        weights = sum(p.numel() for p in self.model.parameters())
        foreign = self.shape.foreign is not None  # whose forward passes may not run side by side
        alone = cfg.device == "cpu" and not (self.sharded or foreign)
        self.threads = MicrobatchThreads(cfg.threads if alone and weights <= SMALL else 1)
        if cfg.critic and self.critic is None:
            self.critic = Critic(self.model, cfg.critic)
        if cfg.reference_kl and self.reference is None and not cfg.lora:
            self.reset_reference()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The policy's optimizer. It is built at its first use, because torch imports torch.compile's front end
        for Muon, which takes more than a second."""
        return build_optimizer(self.model, self.cfg.optimizer)

    def build_optimizers(self) -> None:
        """Builds the optimizers now, so that the first step does not wait for them."""
        _ = self.optimizer, self.critic and self.critic.optimizer

    def calibrate_kv_scales(self, samples: Sequence[Sample]) -> None:
        """Measures the KV cache's scales for the present weights, as they are published, on `samples`, if
        `calibrate` is set."""
        if not self.calibrate:
            return
        folds: Mapping[str, Fold] = {}
        if (
            self.smoothing and self.cfg.precision == "full"
        ):  # any other pass is on published numbers
            folds = self.smoothing.folds(self.model.state_dict())
        self.kv_scales = kv_scales(self.model, samples, self.calibrate, self.cfg.device, folds)

    def calibrate_smoothing(self, samples: Sequence[Sample], step: int) -> None:
        """Chooses the scales by channel for the present weights, after step `step`, on some of `samples`, if
        they are due then."""
        if self.smoothing and self.smoothing.due(step):
            batch = pack_samples(first_of(samples, self.smoothing.cfg.tokens), self.cfg.device)
            self.smooth(batch.token_ids, batch.layout)

    def smooth(self, token_ids: torch.Tensor, layout: PackedLayout) -> None:
        """Chooses the scales by channel for the present weights, on these tokens, int64 [T]."""
        assert self.smoothing
        inputs = measured_inputs(self.model, token_ids, layout, self.smoothing.measure)
        self.smoothing.update(self.model.state_dict(), inputs)
        self.fold()

    def fold(self) -> None:
        """Makes a forward pass on published numbers that of the scales by channel in use."""
        if self.smoothing and self.cfg.precision != "full":
            for model in filter(None, (self.model, self.reference)):
                fold(model, self.smoothing.folds(model.state_dict()))

    def reset_reference(self) -> None:
        """Makes the present policy the reference policy."""
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    @property
    def sharded(self) -> bool:
        """True if other ranks hold parts of the model."""
        return self.ranks.size * self.context.size > 1

    @property
    def shape(self) -> DecoderConfig:
        return self.model.config

    @property
    def parallel(self) -> int:
        return self.threads.count

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        # A sharded model's graph becomes invalid in the forward passes that follow.
        graph = graph and not self.sharded

        def scores(number: int) -> Scores:
            with torch.set_grad_enabled(graph and number == 0 and batches[number].learns):
                return self._scores(batches[number])

        return list(self.threads.map(scores, len(batches)))

    @torch.no_grad()
    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor | None]:
        if not self.cfg.reference_kl:
            return [None] * len(batches)
        model = self.reference or self.model

        def logprobs(number: int) -> torch.Tensor:
            def scores(batch: PackedBatch) -> Scores:
                return {"logprobs": token_logprobs(model, batch, self.temperature)[0]}

            heads = model.config.heads
            return scores_over(self.context, batches[number], heads, scores)["logprobs"]

        with nullcontext() if self.reference is not None else adapters_off(self.model):
            return list(self.threads.map(logprobs, len(batches)))

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, first_scores: Scores | None = None
    ) -> list[Metrics]:
        def loss(number: int) -> tuple[torch.Tensor, Metrics]:
            given = first_scores if number == 0 else None
            return loss_of(number, given or self._scores(batches[number]))

        if self.parallel > 1:
            return self._backward_in_threads(loss, len(batches))
        metrics = []
        for number in range(len(batches)):
            value, measured = loss(number)
            # FSDP averages gradients over the ranks, whose sum is wanted.
            (value * (self.ranks.size * self.context.size)).backward()
            metrics.append(measured)
        return metrics

    def _backward_in_threads(
        self, loss: Callable[[int], tuple[torch.Tensor, Metrics]], number: int
    ) -> list[Metrics]:
        """Does the same in several threads. The gradients are added in the order of the micro-batches, so that
        the sum has the bits that one thread gives it."""
        modules = [self.model] if self.critic is None else [self.model, self.critic]
        weights = [p for module in modules for p in module.parameters() if p.requires_grad]

        def gradient(place: int) -> tuple[Sequence[torch.Tensor | None], Metrics]:
            value, measured = loss(place)
            return torch.autograd.grad(value, weights, allow_unused=True), measured

        metrics = []
        for gradients, measured in self.threads.map(gradient, number):
            for weight, grad in zip(weights, gradients, strict=True):
                if grad is not None:
                    # Several weights may have been given the same tensor, hence the copy.
                    weight.grad = grad.clone() if weight.grad is None else weight.grad.add_(grad)
            metrics.append(measured)
        return metrics

    def _scores(self, batch: PackedBatch) -> Scores:
        """Returns the present scores of the model, and of the critic, for each response token."""
        return scores_over(self.context, batch, self.shape.heads, self._scores_of)

    def _scores_of(self, batch: PackedBatch) -> Scores:
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

    def wait_until_read(self) -> None:
        """Waits until no other thread reads the weights, so that they may change."""
        for wait in self.readers:
            wait()

    def step_optimizer(self) -> tuple[Metrics, bool]:
        self.wait_until_read()
        if self.sharded:
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
    """Returns the log-prob of each response token and, without gradient, the entropy of its distribution, both
    float32 [T] nats.

    Only the positions that predict a response token pass through the output head. With `replay`, tokens go to
    the recorded experts.
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
    """Returns what `token_logprobs` returns, from the hidden states [T, D] that predict the response tokens.
    The entropy has a gradient if `entropy_learns`."""
    return model.logprobs(hidden, batch.targets, temperature, entropy_learns, batch.sampling_mask)
