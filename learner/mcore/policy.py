"""The backend in Megatron-core: this rank's shard of policy and critic, on Megatron's schedules and optimizer.

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
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config import AdamW, CriticConfig, MegatronBackend, Run
from areal_q.models import DecoderConfig
from learner.backend import LossOf, Scores
from learner.batch import PackedBatch, Sample
from learner.mcore.cpu import cuda_or_cpu
from learner.mcore.names import entries, padded
from learner.mcore.vocab import vocab_logprobs
from learner.ranks import Ranks, decoded, encoded
from learner.routing import routed
from learner.sharded import Begin
from learner.take_step import take_step
from learner.tap import TokenTap
from learner.trainer import Trainer

with warnings.catch_warnings():
    # That there is no Transformer Engine and no Apex is said in a dozen warnings.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from learner.mcore.aligned import gather_parts, materialise
    from learner.mcore.critic import Pair, Trunk, ValueHead, critic_entries, critic_shapes, values
    from learner.mcore.learnt import Learnt
    from learner.mcore.model import Policy, transformer_config
    from learner.mcore.state import Places, shapes_of


class MegatronShard:
    """This rank's part of rank 0's whole trainer."""

    tap: TokenTap | None = None

    def __init__(self, shape: DecoderConfig, begin: Begin, run: Run) -> None:
        cfg, backend = run.learner, run.learner.backend
        assert isinstance(cfg.optimizer, AdamW) and isinstance(backend, MegatronBackend)
        self._format, self._rounds = run.rollout.format, run.rollout.unquantized == "bf16"
        self.shape, self.cfg, self.temperature = shape, cfg, begin.temperature
        self.updates, self.skipped, self.skipped_in_row = begin.updates, begin.skipped, 0
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
        self.policy.replay = cfg.routing_replay
        plan, shapes = list(entries(shape, backend.pipeline, backend.experts)), shapes_of(shape)
        self._own = Learnt(self.policy, plan, shapes, cfg, cfg.optimizer)
        self._learnt = [self._own]
        self.frozen = self._frozen = None
        if cfg.reference_kl:
            self.frozen = self._stage(shape, config).requires_grad_(False)
            self._frozen = Places(plan, self.frozen)
        self.critic, self._both = None, self.policy
        if cfg.critic:
            self.critic = self._critic(cfg.critic, shape, config)
            trunk = cfg.critic.trunk == "separate"
            plan = critic_entries(shape, backend, trunk)
            shapes = critic_shapes(shapes, shape.width, trunk)
            self._learnt.append(Learnt(self.critic, plan, shapes, cfg, cfg.critic.optimizer))
            if isinstance(self.critic, Trunk):
                self._both = Pair(self.policy, self.critic)
        config.no_sync_func = self._no_sync
        config.finalize_model_grads_func = self._finalize
        self._dirty = False
        """Whether there is a gradient"""

    def _stage(self, shape: DecoderConfig, config: Any) -> Policy:
        precision = self.cfg.precision
        rounds = self._rounds and precision != "full"
        return self._placed(Policy(shape, config, self._stages.rank, precision, rounds))

    def _critic(self, cfg: CriticConfig, shape: DecoderConfig, config: Any) -> ValueHead | Trunk:
        if cfg.trunk == "shared":
            return self._placed(ValueHead(config))
        return self._placed(Trunk(shape, config, self._stages.rank))

    def _placed(self, module: Any) -> Any:
        return module.to(dtype=getattr(torch, self.cfg.dtype), device=self.cfg.device)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for learnt in self._learnt:
                stack.enter_context(learnt.no_sync())
            yield

    def _finalize(self, *_: Any, **__: Any) -> None:
        """Sums up gradients over ranks; of tied embeddings over stages, too, which the critic has not."""
        finalize_model_grads([self._own.ddp])
        for learnt in self._learnt[1:]:
            learnt.ddp.finish_grad_sync()  # type: ignore[operator]

    def _materialise(self) -> None:
        if self.cfg.precision != "full":
            materialise(self.policy, self._own.places, self._format)

    def _materialise_frozen(self) -> None:
        if self.cfg.precision != "full" and self.frozen is not None and self._frozen:
            materialise(self.frozen, self._frozen, self._format)

    # The backend's methods

    @property
    def lr(self) -> float:
        return self._own.lr

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        return take_step(self, samples)

    def scores(self, batches: Sequence[PackedBatch], graph: bool = False) -> list[Scores]:
        if self._stages.size == 1:
            with torch.no_grad():
                return self._run(self._both, batches, self._says, forward_only=True)

        def stacked(batch: PackedBatch, hidden: Tensor) -> Tensor:
            return torch.stack(list(self._says(batch, hidden).values()))

        found = self._scored(self._both, batches, stacked, len(self._names))
        return [dict(zip(self._names, rows, strict=True)) for rows in found]

    def reference_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor | None]:
        if self.frozen is None:
            return [None] * len(batches)
        frozen = self.frozen

        def logprobs(batch: PackedBatch, hidden: Tensor) -> Tensor:
            return self._head(frozen, batch, hidden)[0][None]

        return [rows[0] for rows in self._scored(frozen, batches, logprobs, 1)]

    def backward(
        self, batches: Sequence[PackedBatch], loss_of: LossOf, made: Scores | None = None
    ) -> list[Metrics]:
        scale, number = len(batches) * self.ranks.size, iter(range(len(batches)))

        def loss(batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            out, metrics = loss_of(next(number), self._says(batch, hidden))
            # The schedule divides in place by the number of micro-batches, DDP by that of its ranks.
            return out * scale, metrics

        self._dirty = True
        found = self._run(self._both, batches, loss, forward_only=False)
        if self._stages.size == 1:
            return found
        last = self._stages.size - 1
        own = [encoded(m) for m in found] or [b""] * len(batches)
        return [decoded(self._stages.broadcast(data, last)) for data in own]

    def update(self) -> tuple[Metrics, bool]:
        norms = [learnt.step(self.updates) if self._dirty else 0.0 for learnt in self._learnt]
        names = ("train/grad_norm", "value/grad_norm")
        metrics: Metrics = {name: Mean(norm, 1) for name, norm in zip(names, norms, strict=False)}
        if self._dirty:
            self._materialise()
        self._dirty = False
        return metrics, all(math.isfinite(norm) for norm in norms)

    # What goes through Megatron's schedules

    @property
    def _names(self) -> tuple[str, ...]:
        return ("logprobs", "entropy") if self.critic is None else ("logprobs", "entropy", "values")

    def _says(self, batch: PackedBatch, hidden: Tensor) -> Scores:
        """What policy and critic say, from what leaves the last of `_both`."""
        own, critics = hidden, hidden
        if isinstance(self._both, Pair):
            own, critics = hidden.chunk(2, -1)
        logprobs, entropy = self._head(self.policy, batch, own)
        found: Scores = {"logprobs": logprobs, "entropy": entropy}
        if self.critic is not None:
            found["values"] = values(self.critic, critics, batch)
        if self.policy.routing is not None:
            found["routed"] = routed(self.policy.routing, batch, self.shape)
        return found

    def _scored(
        self,
        model: torch.nn.Module,
        batches: Sequence[PackedBatch],
        finish: Callable[[PackedBatch, Tensor], Tensor],
        rows: int,
    ) -> list[Tensor]:
        """What `finish` makes of the last stage's hidden states, float32 [rows, T], on all stages."""
        with torch.no_grad():
            found = self._run(model, batches, finish, forward_only=True)
        if self._stages.size == 1:
            return found
        found = found or [
            torch.empty(rows, len(b.targets), device=self.cfg.device) for b in batches
        ]
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
        rank, size = self._own.places.rank, self._own.places.size
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
        for learnt, (module, optimizer) in zip(self._learnt, self._wholes(whole), strict=True):
            learnt.load(module)
            if begin.moments:
                learnt.load_moments(module, optimizer)
        self._materialise()
        if self._frozen:
            reference = whole.reference if whole else None
            weights = dict(reference.named_parameters()) if reference else None
            for p, value in self._frozen.scatter(weights, shapes_of(self.shape)):
                p.data.copy_(value)
            self._materialise_frozen()

    def _wholes(
        self, whole: Trainer | None
    ) -> list[tuple[torch.nn.Module | None, torch.optim.Optimizer | None]]:
        """Rank 0's counterparts of `_learnt`."""
        if whole is None:
            return [(None, None)] * len(self._learnt)
        critic = [(whole.critic, whole.critic.optimizer)] if whole.critic else []
        return [(whole.model, whole.optimizer), *critic]

    @torch.no_grad()
    def gather_weights(self, whole: Trainer | None) -> None:
        self._own.gather(whole.model if whole else None)
        if self.cfg.precision != "full":
            gather_parts(self.policy, self._own.places, whole.model if whole else None)

    @torch.no_grad()
    def gather_rest(self, whole: Trainer | None) -> None:
        for learnt, (module, optimizer) in zip(self._learnt, self._wholes(whole), strict=True):
            if learnt is not self._own:
                learnt.gather(module)
            learnt.gather_moments(module, optimizer)

    @torch.no_grad()
    def share_of_rest(self, whole: Trainer | None) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        parts = ("optimizer", "critic_optimizer")
        for part, learnt, (module, _) in zip(
            parts, self._learnt, self._wholes(whole), strict=False
        ):
            if learnt is not self._own:
                learnt.gather(module)
            kept |= learnt.share_of_moments(part)
        return kept

    @torch.no_grad()
    def reset_reference(self) -> None:
        assert self.frozen is not None
        for frozen, own in zip(self.frozen.parameters(), self.policy.parameters(), strict=True):
            frozen.copy_(own)
        self._materialise_frozen()

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
        ps.initialize_model_parallel(
            backend.tensor, backend.pipeline, expert_model_parallel_size=backend.experts
        )
        if cfg.device.startswith("cuda"):
            tensor_parallel.model_parallel_cuda_manual_seed(run.seed)
        shard = MegatronShard(DecoderConfig.from_hf(begin.model), begin, run)
        shard.load(begin, whole)
    return shard


def _finished(finish: Callable, batch: PackedBatch, hidden: Tensor, non_loss_data: bool = False):
    return finish(batch, hidden)
