"""A trainable module of a stage, in Megatron's DDP and with its distributed optimizer."""
# pyright: reportMissingImports=false

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor, nn

from areal_q.config import AdamW, LearnerConfig
from learner.backends.megatron.cuda_shim import cuda_or_cpu
from learner.backends.megatron.settings import optimizer_config
from learner.backends.megatron.shard_state import (
    MOMENTS,
    OptimizerState,
    ShardLayout,
    named_moments,
)
from learner.backends.megatron.tensor_names import TensorEntry
from learner.optim.build import in_order, learning_rate


class DdpModule:
    """A module in Megatron's DDP, with its own optimizer. As `whole` rank 0 passes its whole counterpart of the
    module, other ranks None.

    `plan` has the trainable parameters, `frozen` the others; `shapes` are those of the sources
    of both, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: list[TensorEntry],
        shapes: Mapping[str, torch.Size],
        cfg: LearnerConfig,
        optimizer: AdamW,
        frozen: Sequence[TensorEntry] = (),
    ) -> None:
        self._shapes, self._settings = shapes, optimizer
        self._ddp = DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
            ),
            module,
        )
        self.no_sync, self._module = self._ddp.no_sync, module
        self._optimizer = get_megatron_optimizer(optimizer_config(cfg, optimizer), [self._ddp])
        self._state = OptimizerState(
            getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        )
        self.places, self._frozen = ShardLayout(plan, module), ShardLayout(frozen, module)
        self._masters = cfg.products != "float32"

    def sum_gradients(self) -> None:
        """Sums gradients over data-parallel ranks; gradients of parameters that several ranks have are also
        summed over these. Collective."""
        if isinstance(self._module, GPTModel):
            finalize_model_grads([self._ddp])
        else:
            self._ddp.finish_grad_sync()

    def step(self, update: int) -> float:
        """Takes optimizer step `update` if the gradient is finite, and clears the gradient. Returns the
        gradient's norm before clipping. Collective."""
        lr = learning_rate(self._settings, update)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)
        with cuda_or_cpu():
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            if math.isfinite(norm):
                self._optimizer.step()
            self._optimizer.zero_grad()
            self._ddp.zero_grad_buffer()
        return norm

    def load(self, whole: nn.Module | None) -> None:
        """Loads rank 0's weights. Collective."""
        weights = None
        if whole:  # buffers are included, because a frozen bias is one
            weights = dict(whole.named_parameters()) | dict(whole.named_buffers())
        for p, value in self.places.scatter(weights, self._shapes):
            p.data.copy_(value)
            self._state.set(p, "param", value)
        for p, value in self._frozen.scatter(weights, self._shapes):
            p.data.copy_(value)

    def load_moments(
        self, whole: nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Loads rank 0's moments. Collective."""
        for name in MOMENTS:
            moments = named_moments(whole, optimizer, name) if whole and optimizer else None
            for p, value in self.places.scatter(moments, self._shapes):
                self._state.set(p, name, value)
        count = torch.zeros(())
        if optimizer:
            count = max(slot["step"].cpu() for slot in optimizer.state.values() if slot)
        dist.broadcast(count, 0)
        for p in self.places.own.values():
            self._state.set_steps(p, count)

    def gather(self, whole: nn.Module | None) -> None:
        """Copies the weights into rank 0's. Collective."""
        read = self._state.read("param") if self._masters else torch.Tensor.float
        self.places.gather(read, dict(whole.named_parameters()) if whole else None)

    def gather_moments(
        self, whole: nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Copies the moments into rank 0's. Collective."""
        steps = self._state.steps()
        if not steps:
            return
        for name in MOMENTS:
            targets = named_moments(whole, optimizer, name) if whole and optimizer else None
            self.places.gather(self._state.read(name), targets)
        if optimizer:
            for slot in optimizer.state.values():
                slot["step"] = steps.clone()

    def share_of_moments(self, part: str) -> dict[str, Tensor]:
        """Returns the whole moments that this rank writes, by their names in a checkpoint. The ranks of a stage
        divide the stage's moments among them. Collective."""
        steps = self._state.steps()
        if not steps:
            return {}
        learning = {source for entry in self.places.plan for source in entry.sources}
        shapes = {name: shape for name, shape in self._shapes.items() if name in learning}
        number = {name: i for i, name in enumerate(in_order(shapes))}
        kept: dict[str, Tensor] = {}
        for entry in self.places.plan:
            if entry.copy or not self.places.here(entry):
                continue
            for name in MOMENTS:
                tensors = self.places.whole(entry, self._state.read(name))
                for source, tensor in zip(entry.sources, tensors, strict=True):
                    i = number[source]
                    mine = i % self.places.ranks_in_stage == self.places.index_in_stage
                    if entry.owner is not None:
                        mine = self.places.sends_to_rank_0(entry)
                    if mine:
                        kept[f"{part}.{i}.{name}"] = tensor.cpu().clone()
                        kept[f"{part}.{i}.step"] = steps.clone()
        return kept
