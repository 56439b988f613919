"""The Megatron backend: this rank's shard of policy and critic, on Megatron's schedules and optimizer.

    update_policy ─scores, reference─▶ schedule, forward only ─▶ last stage: log-probs ─broadcast─▶ all stages
                  ─backward──────────▶ schedule, 1F1B ─▶ last stage: loss, metrics ─broadcast─▶ all stages
                  ─step_optimizer────▶ clip, distributed optimizer, all-gather of the weights

Tensor-parallel ranks, those that share tokens (learner/backends/context_parallel.py), and the stages of a
pipeline, work on the same micro-batches; `ranks` are the data-parallel ones, among which the samples are
divided. The losses of micro-batches add up to the step's loss,
so that their gradients must be summed, while Megatron averages over micro-batches and ranks.
"""
# pyright: reportMissingImports=false

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor

from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import AdamW, CriticConfig, MegatronBackend, Run
from areal_q.models import DecoderConfig
from learner.backends.base import LossOf, Scores
from learner.backends.context_parallel import SharedBatch
from learner.backends.data_parallel import Ranks
from learner.backends.megatron.cuda_shim import cuda_or_cpu
from learner.backends.megatron.tensor_names import entries
from learner.backends.messages import Begin
from learner.backends.single_device import TorchPolicy
from learner.data.packing import PackedBatch

with warnings.catch_warnings():
    # Megatron warns a dozen times that Transformer Engine and Apex are missing.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel

    from learner.backends.megatron.critic import (
        CriticTrunk,
        PolicyAndCritic,
        ValueHead,
        critic_entries,
        critic_shapes,
        values,
    )
    from learner.backends.megatron.ddp_module import DdpModule
    from learner.backends.megatron.layers.lora import (
        AdapterSettings,
        adapters_off,
        load_base,
        split,
        with_adapters,
    )
    from learner.backends.megatron.layers.moe import read_report, report_size
    from learner.backends.megatron.layers.quantized_forward import gather_parts, materialise
    from learner.backends.megatron.layers.vocab_logprobs import parallel_token_logprobs
    from learner.backends.megatron.model import MegatronModel
    from learner.backends.megatron.schedule import Stages
    from learner.backends.megatron.settings import transformer_config
    from learner.backends.megatron.shard_state import ShardLayout, shapes_of


class MegatronShard:
    """This rank's part of rank 0's whole policy."""

    def __init__(self, shape: DecoderConfig, begin: Begin, run: Run) -> None:
        cfg, backend = run.learner, run.learner.backend
        assert isinstance(cfg.optimizer, AdamW) and isinstance(backend, MegatronBackend)
        self._format, self._rounds = run.rollout.format, run.rollout.rounds_rest
        self.shape, self.cfg, self.temperature = shape, cfg, begin.temperature
        self.updates, self.skipped, self.skipped_in_row = begin.updates, begin.skipped, 0
        self.ranks = Ranks(
            ps.get_data_parallel_rank(),
            ps.get_data_parallel_world_size(),
            ps.get_data_parallel_group(),
        )
        self._stages = Stages(cfg.device, shape.heads // backend.tensor)
        self._lora = AdapterSettings(cfg.lora, self._format) if cfg.lora else None
        config = transformer_config(shape, cfg, backend)
        self.policy = self._stage(shape, config)
        self.policy.replay = cfg.routing_replay
        self._plan = plan = list(entries(shape, backend.pipeline, backend.experts))
        shapes, (learning, rest) = with_adapters(shapes_of(shape), cfg.lora), split(plan, cfg.lora)
        self._own = DdpModule(self.policy, learning, shapes, cfg, cfg.optimizer, rest)
        self._ddp_modules = [self._own]
        self.frozen = self._frozen = None
        if cfg.reference_kl and not cfg.lora:
            self.frozen = self._stage(shape, config).requires_grad_(False)
            self._frozen = ShardLayout(plan, self.frozen)
        self.critic, self._both = None, self.policy
        if cfg.critic:
            self.critic = self._critic(cfg.critic, shape, config)
            trunk = cfg.critic.trunk == "separate"
            learning, rest = critic_entries(shape, backend, trunk, cfg.lora)
            shapes = critic_shapes(shapes, shape.width, trunk)
            self._ddp_modules.append(
                DdpModule(self.critic, learning, shapes, cfg, cfg.critic.optimizer, rest)
            )
            if isinstance(self.critic, CriticTrunk):
                self._both = PolicyAndCritic(self.policy, self.critic)
        config.no_sync_func = self._no_sync
        config.finalize_model_grads_func = self._finalize
        self._dirty = False
        """True if a gradient was accumulated since the last step."""

    def _stage(self, shape: DecoderConfig, config: Any) -> MegatronModel:
        precision = self.cfg.precision
        rounds = self._rounds and precision != "full"
        return self._placed(
            MegatronModel(shape, config, self._stages.rank, precision, rounds, self._lora)
        )

    def _critic(
        self, cfg: CriticConfig, shape: DecoderConfig, config: Any
    ) -> ValueHead | CriticTrunk:
        if cfg.trunk == "shared":
            return self._placed(ValueHead(config))
        return self._placed(CriticTrunk(shape, config, self._stages.rank, self._lora))

    def _placed(self, module: Any) -> Any:
        return module.to(dtype=getattr(torch, self.cfg.products), device=self.cfg.device)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for ddp_module in self._ddp_modules:
                stack.enter_context(ddp_module.no_sync())
            yield

    def _finalize(self, *_: Any, **__: Any) -> None:
        for ddp_module in self._ddp_modules:
            ddp_module.sum_gradients()

    def _materialise(self, model: MegatronModel | None, places: ShardLayout | None) -> None:
        if self.cfg.precision != "full" and model is not None and places:
            materialise(model, places, self._format)

    # The backend's methods

    parallel = 1

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        def flat_scores(batch: SharedBatch, hidden: Tensor) -> Tensor:
            scores = self._scores(batch, hidden)
            return torch.cat([*(scores[name] for name in self._names), self.policy.report])

        def size(batch: PackedBatch) -> int:
            return len(self._names) * len(batch.targets) + report_size(self.shape)

        found = self._stages.on_all(self._both, batches, flat_scores, size)
        return [self._scores_in(x, batch) for x, batch in zip(found, batches, strict=True)]

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        if not self.cfg.reference_kl:
            return [None] * len(batches)
        model = self.frozen or self.policy

        def logprobs(batch: SharedBatch, hidden: Tensor) -> Tensor:
            own, _ = self._logprobs(model, batch.own, hidden)
            return batch.joined({"logprobs": own})["logprobs"]

        with adapters_off(model):
            return [*self._stages.on_all(model, batches, logprobs, lambda b: len(b.targets))]

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, first_scores: Scores | None = None
    ) -> list[Metrics]:
        scale, number = len(batches) * self.ranks.size, iter(range(len(batches)))

        def loss(batch: SharedBatch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            out, metrics = loss_of(next(number), self._scores(batch, hidden))
            # The schedule divides by the number of micro-batches, in place, and DDP by that of its ranks.
            return out * scale, metrics

        self._dirty = True
        found = self._stages.run(self._both, batches, loss, forward_only=False)
        return self._stages.metrics(found, len(batches))

    def step_optimizer(self) -> tuple[Metrics, bool]:
        norms = [
            ddp_module.step(self.updates) if self._dirty else 0.0
            for ddp_module in self._ddp_modules
        ]
        names = ("train/grad_norm", "value/grad_norm")
        metrics: Metrics = {name: Mean(norm, 1) for name, norm in zip(names, norms, strict=False)}
        if self._dirty:
            self._materialise(self.policy, self._own.places)
        self._dirty = False
        return metrics, all(math.isfinite(norm) for norm in norms)

    # Scores from hidden states

    @property
    def _names(self) -> tuple[str, ...]:
        return ("logprobs", "entropy") if self.critic is None else ("logprobs", "entropy", "values")

    def _scores(self, batch: SharedBatch, hidden: Tensor) -> Scores:
        """Returns the scores of `batch` from the hidden states of the last stage."""
        own, critics = hidden, hidden
        if isinstance(self._both, PolicyAndCritic):
            own, critics = hidden.chunk(2, -1)
        logprobs, entropy = self._logprobs(self.policy, batch.own, own)
        found = {"logprobs": logprobs, "entropy": entropy}
        if self.critic is not None:
            found["values"] = values(self.critic, critics, batch.own)
        found = batch.joined(found)
        if len(self.policy.report):
            found["routed"] = read_report(self.policy.report, batch.whole, self.shape)
        return found

    def _scores_in(self, flat: Tensor, batch: PackedBatch) -> Scores:
        """Returns the scores of `batch` from a flat tensor: the scores' columns, then the routers' report."""
        count = len(self._names) * len(batch.targets)
        found: Scores = dict(zip(self._names, flat[:count].view(len(self._names), -1), strict=True))
        if len(flat) > count:
            found["routed"] = read_report(flat[count:], batch, self.shape)
        return found

    def _logprobs(
        self, model: MegatronModel, batch: PackedBatch, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        bonus = self.cfg.entropy_coef > 0
        return parallel_token_logprobs(model, batch, hidden, self.temperature, bonus)

    # To and from rank 0's whole policy

    @torch.no_grad()
    def load(self, begin: Begin, ranks: Ranks, whole: TorchPolicy | None) -> None:
        """Loads rank 0's weights and moments, which it sends to all `ranks`. Collective."""
        if self._lora:
            trunk = [self.critic] if isinstance(self.critic, CriticTrunk) else []
            base, device = whole.model if whole else None, self.cfg.device
            load_base([self.policy, *trunk], self._plan, self._stages.rank, ranks, base, device)
        for ddp_module, module, optimizer in self._with_wholes(whole):
            ddp_module.load(module)
            if begin.moments:
                ddp_module.load_moments(module, optimizer)
        self._materialise(self.policy, self._own.places)
        if self._frozen:
            reference = whole.reference if whole else None
            weights = dict(reference.named_parameters()) if reference else None
            for p, value in self._frozen.scatter(weights, shapes_of(self.shape)):
                p.data.copy_(value)
            self._materialise(self.frozen, self._frozen)

    def _with_wholes(
        self, whole: TorchPolicy | None
    ) -> Iterator[tuple[DdpModule, torch.nn.Module | None, torch.optim.Optimizer | None]]:
        """Yields each of `_ddp_modules` with rank 0's counterpart and its optimizer."""
        yield self._own, whole and whole.model, whole and whole.optimizer
        critic = whole and whole.critic
        for ddp_module in self._ddp_modules[1:]:
            yield ddp_module, critic, critic and critic.optimizer

    @torch.no_grad()
    def gather_weights(self, whole: TorchPolicy | None) -> None:
        self._own.gather(whole.model if whole else None)
        if self.cfg.precision != "full":
            gather_parts(self.policy, self._own.places, whole.model if whole else None)

    @torch.no_grad()
    def gather_rest(self, whole: TorchPolicy | None) -> None:
        for ddp_module, module, optimizer in self._with_wholes(whole):
            if ddp_module is not self._own:
                ddp_module.gather(module)
            ddp_module.gather_moments(module, optimizer)

    @torch.no_grad()
    def share_of_rest(self, whole: TorchPolicy | None) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        parts = ("optimizer", "critic_optimizer")
        for part, (ddp_module, module, _) in zip(parts, self._with_wholes(whole), strict=False):
            if ddp_module is not self._own:
                ddp_module.gather(module)
            kept |= ddp_module.share_of_moments(part)
        return kept

    @torch.no_grad()
    def reset_reference(self) -> None:
        assert self.frozen is not None
        for frozen, own in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            frozen.copy_(own)
        self._materialise(self.frozen, self._frozen)

    def close(self) -> None:
        ps.destroy_model_parallel()


def megatron_shard(
    begin: Begin, run: Run, ranks: Ranks, whole: TorchPolicy | None
) -> MegatronShard:
    """Returns this rank's part of rank 0's `whole` policy. Collective."""
    cfg, backend = run.learner, run.learner.backend
    assert isinstance(backend, MegatronBackend)
    if cfg.device.startswith("cuda"):
        cfg = msgspec.structs.replace(cfg, device=f"cuda:{os.environ['LOCAL_RANK']}")
        run = msgspec.structs.replace(run, learner=cfg)
        torch.cuda.set_device(cfg.device)
    with cuda_or_cpu():
        ps.initialize_model_parallel(
            backend.tensor,
            backend.pipeline,
            context_parallel_size=backend.context,
            expert_model_parallel_size=backend.experts,
            expert_tensor_parallel_size=1,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(run.seed)
        shard = MegatronShard(DecoderConfig.from_hf(begin.model), begin, run)
        shard.load(begin, ranks, whole)
    return shard
