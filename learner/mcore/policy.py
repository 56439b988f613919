"""The backend in Megatron-core: this rank's shard of the policy, on Megatron's schedules, DDP and optimizer.

    take_step ─scores, reference─▶ schedule, forward only ─▶ last stage: log-probs ─broadcast─▶ all stages
              ─backward──────────▶ schedule, 1F1B ─▶ last stage: loss, metrics ─broadcast─▶ all stages
              ─update────────────▶ clip, distributed optimizer, all-gather of the weights

Tensor-parallel ranks, and the stages of a pipeline, work on the same micro-batches; `ranks` are the
data-parallel ones, which share the samples out. A micro-batch's loss is already a part of the whole step's, so
that gradients are summed, where Megatron would average them over micro-batches and ranks.
"""
# pyright: reportMissingImports=false

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import AdamW, MegatronBackend, Run
from areal_q.models import DecoderConfig
from learner.backend import LossOf, Scores
from learner.batch import PackedBatch, Sample
from learner.mcore.cpu import cuda_or_cpu
from learner.mcore.names import entries, padded
from learner.mcore.vocab import vocab_logprobs
from learner.optim import learning_rate
from learner.ranks import Ranks, decoded, encoded
from learner.sharded import Begin
from learner.take_step import take_step
from learner.tap import TokenTap
from learner.trainer import Trainer

with warnings.catch_warnings():
    # That there is no Transformer Engine and no Apex is said in a dozen warnings.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from learner.mcore.aligned import gather_parts, materialise
    from learner.mcore.model import Policy, optimizer_config, transformer_config
    from learner.mcore.state import MOMENTS, OptimizerState, Places, named_moments, shapes_of


class MegatronShard:
    """This rank's part of rank 0's whole trainer."""

    tap: TokenTap | None = None

    def __init__(self, shape: DecoderConfig, begin: Begin, run: Run) -> None:
        cfg, backend = run.learner, run.learner.backend
        assert isinstance(cfg.optimizer, AdamW) and isinstance(backend, MegatronBackend)
        self._format, self._rounds = run.rollout.format, run.rollout.unquantized == "bf16"
        self.shape, self.cfg, self.temperature = shape, cfg, begin.temperature
        self.updates, self.skipped, self.skipped_in_row = begin.updates, begin.skipped, 0
        self.lr = 0.0
        self.ranks = Ranks(
            ps.get_data_parallel_rank(),
            ps.get_data_parallel_world_size(),
            ps.get_data_parallel_group(),
        )
        self._stages = Ranks(
            ps.get_pipeline_model_parallel_rank(),
            ps.get_pipeline_model_parallel_world_size(),
            ps.get_pipeline_model_parallel_group(),
        )
        config = transformer_config(shape, cfg, backend)
        self.policy = self._stage(shape, config)
        self.frozen = None
        if cfg.reference_kl:
            self.frozen = self._stage(shape, config).requires_grad_(False)
        self._ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            self.policy,
        )
        config.no_sync_func = self._ddp.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(optimizer_config(cfg), [self._ddp])
        (inner,) = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        self._state = OptimizerState(inner)
        plan = list(entries(shape, backend.pipeline))
        self._places = Places(plan, self.policy)
        self._masters = cfg.dtype != "float32"
        self._dirty = False
        """Whether there is a gradient"""

    def _stage(self, shape: DecoderConfig, config: Any) -> Policy:
        precision = self.cfg.precision
        rounds = self._rounds and precision != "full"
        stage = Policy(shape, config, self._stages.rank, precision, rounds)
        return stage.to(dtype=config.params_dtype, device=self.cfg.device)

    def _materialise(self, *stages: Policy | None) -> None:
        for stage in stages if self.cfg.precision != "full" else ():
            if stage is not None:
                materialise(stage, Places(self._places.plan, stage), self._format)

    # The backend's methods

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        return take_step(self, samples)

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        found = self._logprobs_of(self.policy, batches)
        return [{"logprobs": pair[0], "entropy": pair[1]} for pair in found]

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        if self.frozen is None:
            return [None] * len(batches)
        return [pair[0] for pair in self._logprobs_of(self.frozen, batches)]

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, made: Scores | None = None
    ) -> list[Metrics]:
        scale, number = len(batches) * self.ranks.size, iter(range(len(batches)))

        def loss(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            logprobs, entropy = self._head(self.policy, batch, hidden)
            out, metrics = loss_of(next(number), {"logprobs": logprobs, "entropy": entropy})
            # The schedule divides in place by the number of micro-batches, DDP by that of its ranks.
            return out * scale, metrics

        self._dirty = True
        found = self._run(self._ddp, batches, loss, forward_only=False)
        if self._stages.size == 1:
            return found
        last = self._stages.size - 1
        own = [encoded(m) for m in found] or [b""] * len(batches)
        return [decoded(self._stages.broadcast(data, last)) for data in own]

    def update(self) -> tuple[Metrics, bool]:
        assert isinstance(self.cfg.optimizer, AdamW)
        lr, norm = learning_rate(self.cfg.optimizer, self.updates), 0.0
        if self._dirty:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
                group["weight_decay"] = self.cfg.optimizer.weight_decay * group.get("wd_mult", 1.0)
            with cuda_or_cpu():
                self.optimizer.prepare_grads()
                norm = float(self.optimizer.get_grad_norm())
                if math.isfinite(norm):
                    self.optimizer.step()
                self.optimizer.zero_grad()
                self._ddp.zero_grad_buffer()
        taken = math.isfinite(norm)
        if taken:
            self.lr = lr
            if self._dirty:
                self._materialise(self.policy)
        self._dirty = False
        return {"train/grad_norm": Mean(norm, 1)}, taken

    # What goes through Megatron's schedules

    def _logprobs_of(self, model: Policy, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """float32 [2, T] of each batch, on all stages: log-probs and entropies."""

        def pair(batch: PackedBatch, hidden: Tensor) -> Tensor:
            return torch.stack(self._head(model, batch, hidden))

        with torch.no_grad():
            found = self._run(model, batches, pair, forward_only=True)
        if self._stages.size == 1:
            return found
        found = found or [torch.empty(2, len(b.targets), device=self.cfg.device) for b in batches]
        for tensor in found:
            last = self._stages.size - 1
            dist.broadcast(tensor, group=self._stages.group, group_src=last)
        return found

    def _run(
        self,
        model: torch.nn.Module,
        batches: Sequence[PackedBatch],
        finish: Callable[[PackedBatch, Tensor], Any],
        forward_only: bool,
    ) -> list[Any]:
        """What `finish` makes of the last stage's hidden states, with the gradient of the first of the two
        that it returns unless `forward_only`; in the batches' order, and nothing on other stages."""
        if not batches:
            return []

        def forward(batches: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)
            return model(batch), partial(_finished, finish, batch)

        with cuda_or_cpu():
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=len(batches),
                seq_length=1,  # told by each sender, as lengths differ
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _head(self, model: Policy, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T] from hidden states [N, 1, D] after the final norm."""
        states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden[batch.predict, 0])
        rank, size = self._places.rank, self._places.size
        first = rank * padded(model.shape.vocab_size, size) // size
        return vocab_logprobs(
            states,
            model.head[: model.shape.vocab_size - first],
            first,
            batch.targets,
            self.temperature,
            self.cfg.entropy_coef > 0,
            ps.get_tensor_model_parallel_group(),
        )

    # The whole

    @torch.no_grad()
    def load(self, begin: Begin, whole: Trainer | None) -> None:
        """Rank 0's weights and moments. Collective."""
        shapes = shapes_of(self.policy.shape)
        weights = dict(whole.model.named_parameters()) if whole else None
        for p, value in self._places.scatter(weights, shapes):
            p.data.copy_(value)
            self._state.set(p, "param", value)
        if self.frozen is not None:
            weights = (
                dict(whole.reference.named_parameters()) if whole and whole.reference else None
            )
            for p, value in Places(self._places.plan, self.frozen).scatter(weights, shapes):
                p.data.copy_(value)
        self._materialise(self.policy, self.frozen)
        if not begin.moments:
            return
        for name in MOMENTS:
            moments = named_moments(whole, name) if whole else None
            for p, value in self._places.scatter(moments, shapes):
                self._state.set(p, name, value)
        count = torch.zeros(())
        if whole:
            count = max(slot["step"].cpu() for slot in whole.optimizer.state.values() if slot)
        dist.broadcast(count, 0)
        for p in self._places.own.values():
            self._state.set_steps(p, count)

    @torch.no_grad()
    def gather_weights(self, whole: Trainer | None) -> None:
        read = self._state.read("param") if self._masters else torch.Tensor.float
        self._places.gather(read, dict(whole.model.named_parameters()) if whole else None)
        if self.cfg.precision != "full":
            gather_parts(self.policy, self._places, whole.model if whole else None)

    @torch.no_grad()
    def gather_rest(self, whole: Trainer | None) -> None:
        steps = self._state.steps()
        if not steps:
            return
        for name in MOMENTS:
            self._places.gather(
                self._state.read(name), named_moments(whole, name) if whole else None
            )
        if whole:
            for slot in whole.optimizer.state.values():
                slot["step"] = steps.clone()

    def share_of_rest(self, whole: Trainer | None) -> dict[str, Tensor]:
        """Rank 0 has all of it."""
        self.gather_rest(whole)
        return {}

    @torch.no_grad()
    def reset_reference(self) -> None:
        assert self.frozen is not None
        for frozen, own in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            frozen.copy_(own)
        self._materialise(self.frozen)

    def close(self) -> None:
        ps.destroy_model_parallel()


def megatron_shard(begin: Begin, run: Run, ranks: Ranks, whole: Trainer | None) -> MegatronShard:
    """Collective: this rank's part of rank 0's `whole`."""
    cfg, backend = run.learner, run.learner.backend
    assert isinstance(backend, MegatronBackend)
    if cfg.device.startswith("cuda"):
        cfg = msgspec.structs.replace(cfg, device=f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(cfg.device)
        run = msgspec.structs.replace(run, learner=cfg)
    with cuda_or_cpu():
        ps.initialize_model_parallel(backend.tensor, backend.pipeline)
        if cfg.device.startswith("cuda"):
            tensor_parallel.model_parallel_cuda_manual_seed(run.seed)
        shard = MegatronShard(DecoderConfig.from_hf(begin.model), begin, run)
        shard.load(begin, whole)
    return shard


def _finished(finish: Callable, batch: PackedBatch, hidden: Tensor, non_loss_data: bool = False):
    return finish(batch, hidden)
