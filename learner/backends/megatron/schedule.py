"""Megatron's schedules, which run micro-batches forward and backward over the stages of a pipeline.

run        1F1B, or forward only; only the last stage has the results
on_all     forward only ─▶ last stage ─broadcast─▶ all stages
metrics    the last stage's metrics ─broadcast─▶ all stages
"""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from areal_q.algorithms.reducers import Metrics
from learner.backends.context_parallel import SharedBatch
from learner.backends.data_parallel import Ranks, decoded, encoded
from learner.backends.megatron.cuda_shim import cuda_or_cpu
from learner.data.packing import PackedBatch

_Finish = Callable[[SharedBatch, Tensor], Any]
"""A function of a batch and the hidden states of this rank's tokens from the last stage."""


class Stages:
    """The stages of this rank's pipeline, which all work on the same micro-batches, and on the same tokens of
    them as those that share tokens with it."""

    def __init__(self, device: str, heads: int) -> None:
        """Each rank of `device` has so many query `heads`."""
        self._device, self._heads = device, heads
        self._sharing = Ranks(
            ps.get_context_parallel_rank(),
            ps.get_context_parallel_world_size(),
            ps.get_context_parallel_group(),
        )
        self._ranks = Ranks(
            ps.get_pipeline_model_parallel_rank(),
            ps.get_pipeline_model_parallel_world_size(),
            ps.get_pipeline_model_parallel_group(),
        )
        self.rank, self.size = self._ranks.rank, self._ranks.size
        self.last = self.size - 1

    def run(
        self, model: nn.Module, batches: Sequence[PackedBatch], finish: _Finish, forward_only: bool
    ) -> list[Any]:
        """Runs all batches and returns the results of `finish` in their order; empty on all
        stages but the last. Unless `forward_only`, `finish` returns two values, and the gradient
        of the first is accumulated."""
        if not batches:
            return []

        def forward(batches: Iterator[PackedBatch], model: nn.Module) -> tuple[Tensor, Any]:
            shared = SharedBatch.of(next(batches), self._sharing, self._heads)
            return model(shared.own), partial(_finished, finish, shared)

        with cuda_or_cpu():
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(batches),
                model=[model],
                num_microbatches=len(batches),
                seq_length=1,  # ignored: as lengths differ, each sender sends its own
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    @torch.no_grad()
    def on_all(
        self,
        model: nn.Module,
        batches: Sequence[PackedBatch],
        finish: _Finish,
        size: Callable[[PackedBatch], int],
    ) -> list[Tensor]:
        """Returns on all stages the result of `finish` for each batch, float32 [size(batch)]. Collective."""
        found = self.run(model, batches, finish, forward_only=True)
        if self.size == 1:
            return found
        found = found or [torch.empty(size(batch), device=self._device) for batch in batches]
        for tensor in found:
            dist.broadcast(tensor, group=self._ranks.group, group_src=self.last)
        return found

    def metrics(self, own: list[Metrics], count: int) -> list[Metrics]:
        """Returns the last stage's metrics of `count` batches on all stages. Collective."""
        if self.size == 1:
            return own
        data = [encoded(m) for m in own] or [b""] * count
        return [decoded(self._ranks.broadcast(each, self.last)) for each in data]


def _finished(finish: _Finish, shared: SharedBatch, hidden: Tensor, non_loss_data: bool = False):
    return finish(shared, hidden)
