"""The quantized forward (areal_q/models/low_bit) on tensor-parallel ranks.

Activations are quantized by whole rows, or by groups along them. Therefore a rank computes some of a product's
outputs from all of its inputs, with the very numbers of one process, and partial sums are never added:

                 QuantizedColumn: linear_qkv, linear_fc1                 QuantizedRow: linear_proj, linear_fc2
    forward      x ─▶ its outputs                               all-gather x ─▶ a part of y ─▶ all-gather
    ∂x, QaRL     ∂y · its shard ─▶ all-reduce                   ∂y · its shard
    ∂x, Jet      all-gather ∂y ─▶ a part of ∂x ─▶ all-gather    ∂y ─▶ its inputs
    ∂W           its shard's                                    its shard's

Master weights stay in Megatron's shards. `materialise` gathers them and quantizes them as for publishing, with
scales and blocks across all shards. A rank keeps the rows that it computes with; the first rank of a stage
keeps all, which rank 0 publishes (`gather_parts`). An expert is never divided among ranks.
"""
# pyright: reportMissingImports=false

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from torch import Tensor, nn

from areal_q.linear.fp8_gemm import Operand
from areal_q.linear.quantized_linear import Linear as Product
from areal_q.linear.registry import linear_of
from areal_q.models import Decoder
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.models.low_bit.fp8_training import dgrad, fprop, operands, wgrad
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears, straight_through
from areal_q.quant.activations import quantize_groups_e4m3
from areal_q.quant.format import Parts
from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import is_quantized, parts_of, quantize_state
from learner.backends.megatron.shard_state import ShardLayout
from learner.backends.megatron.tensor_names import TensorEntry


class _Aligned:
    """The base class of both kinds. Outputs are counted over the stacked sources."""

    flow = False
    """True for Jet's forward and backward in FP8, False for QaRL's forward."""
    parts: list[Parts]
    """The quantized tensors of each source, on the rank that sends them to rank 0."""
    product: Product
    """For QaRL, the product with the rows of this rank's outputs."""
    rows: Operand
    """For Jet, the weight [this rank's outputs, in]."""
    columns: list[Operand]
    """For Jet, the transposed weight [this rank's inputs, out] of each source."""

    def take(self, parts: list[Parts], format: str, outputs: Tensor, inputs: Tensor) -> None:
        """Sets the quantized tensors `parts` of each source, after the weights have changed. `outputs` and
        `inputs` are the indices of this rank's, int64."""
        if not self.flow:
            self.product = linear_of(FORMATS[format], parts).rows(outputs)
            return
        rows, columns = zip(*map(operands, parts), strict=True)
        whole = [r.rows(_count(len(r.codes), outputs)) for r in rows]
        stacked = Operand(torch.cat([r.codes for r in whole]), torch.cat([r.scale for r in whole]))
        self.rows = stacked.rows(outputs)
        self.columns = [c.rows(inputs) for c in columns]


class QuantizedColumn(_Aligned, ColumnParallelLinear):
    """A linear whose outputs are divided among ranks: x [..., in] → [..., this rank's outputs]."""

    rounds_rest = False
    heights: list[int]
    """Number of outputs of each source."""
    order: Tensor
    """The position of each output when those of rank 0, 1, … are concatenated."""

    def share(self, entry: TensorEntry, heights: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's outputs and its inputs, int64 each."""
        n, rank = self.tp_group.size(), self.tp_group.rank()
        every = outputs_of(entry, heights, n, self.weight)
        self.heights, self.order = heights, torch.cat(every).argsort()
        return every[rank], _count(width, self.weight).chunk(n)[rank]

    def forward(self, input_: Tensor, *_: Any) -> tuple[Tensor, None]:
        x, bias = input_.flatten(0, -2), self.bias
        if bias is not None and self.rounds_rest:
            bias = straight(bias)
        if self.flow:
            y: Tensor = _Flow.apply(x, self.weight, self)  # type: ignore[assignment]
            y = y if bias is None else y + bias
        else:
            x = copy_to_tensor_model_parallel_region(x, self.tp_group)
            y = straight_through(x, self.weight, bias, self.product)
        return y.view(*input_.shape[:-1], y.shape[-1]), None

    # Of Jet's flow

    def gathered(self, x: Tensor) -> Tensor:
        return x

    def spread(self, y: Tensor) -> Tensor:
        return y

    def own(self, x: Tensor) -> Tensor:
        return x

    def dgrad(self, grad: Tensor) -> Tensor:
        whole = beside(grad, self.tp_group)[:, self.order].split(self.heights, 1)
        parts = [dgrad(g.contiguous(), c) for g, c in zip(whole, self.columns, strict=True)]
        return beside(torch.stack(parts).sum(0), self.tp_group)


class QuantizedRow(_Aligned, RowParallelLinear):
    """A linear whose inputs are divided among ranks: x [..., this rank's inputs] → [..., out]. It has one
    source and no bias."""

    def share(self, entry: TensorEntry, heights: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's outputs and its inputs, int64 each."""
        n, rank = self.tp_group.size(), self.tp_group.rank()
        self.inputs = entry.part([_count(width, self.weight)[None]], rank, n).flatten()
        return _count(sum(heights), self.weight).chunk(n)[rank], self.inputs

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        x = input_.flatten(0, -2)
        if self.flow:
            y: Tensor = _Flow.apply(x, self.weight, self)  # type: ignore[assignment]
        else:
            y = straight_through(x, self.weight, None, self._everywhere)
        return y.view(*input_.shape[:-1], y.shape[-1]), None

    def _everywhere(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.spread(self.product(self.gathered(x)))

    # Of Jet's flow

    def gathered(self, x: Tensor) -> Tensor:
        return beside(x, self.tp_group)

    def spread(self, y: Tensor) -> Tensor:
        return beside(y, self.tp_group)

    def own(self, x: Tensor) -> Tensor:
        return x[:, self.inputs]

    def dgrad(self, grad: Tensor) -> Tensor:
        return dgrad(grad, *self.columns)


class _Flow(torch.autograd.Function):
    """Jet's product, forward and backward, on ranks that each compute some of its outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, linear: QuantizedColumn | QuantizedRow
    ) -> Tensor:
        saved = Operand(*quantize_groups_e4m3(linear.gathered(x)))
        ctx.save_for_backward(saved.codes, saved.scale)
        ctx.linear = linear
        return linear.spread(fprop(saved, linear.rows))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, linear = grads[0].contiguous(), ctx.linear
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = linear.dgrad(grad)
        if ctx.needs_input_grad[1]:
            dw = wgrad(grad, linear.own(Operand(*ctx.saved_tensors).numbers()))
        return dx, dw, None


def outputs_of(entry: TensorEntry, heights: list[int], n: int, like: Tensor) -> list[Tensor]:
    """Returns, for each of n ranks, the indices of its outputs among the stacked sources of `entry`: int64, on
    the device of `like`."""
    numbers = [x[:, None] for x in _count(sum(heights), like).split(heights)]
    return [entry.part(numbers, r, n).flatten() for r in range(n)]


def beside(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the x [T, k] of all n ranks, concatenated to [T, n · k]. Collective."""
    if group.size() == 1:
        return x
    every = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())
    ]
    dist.all_gather(every, x.contiguous(), group=group)
    return torch.cat(every, 1)


def _count(size: int, like: Tensor) -> Tensor:
    """Returns 0 … size - 1, on the device of `like`."""
    return torch.arange(size, device=like.device)


def _quantized(places: ShardLayout) -> Iterator[TensorEntry]:
    return (entry for entry in places.plan if is_quantized(entry.sources[0]))


def _names(entry: TensorEntry) -> list[str]:
    """Returns the names of the sources' modules."""
    return [source.removesuffix(".weight") for source in entry.sources]


@torch.no_grad()
def materialise(module: nn.Module, places: ShardLayout, format: str) -> None:
    """Quantizes this stage's present weights for the forward. Call it whenever they have changed. Collective
    over tensor-parallel ranks. Raises QuantizationError that names a tensor which is not finite."""
    for entry in _quantized(places):
        if not places.here(entry):
            continue
        linear = module.get_submodule(entry.name.removesuffix(".weight"))
        assert isinstance(linear, QuantizedColumn | QuantizedRow)
        whole = places.whole(entry, lambda p: p)
        published = quantize_state(dict(zip(entry.sources, whole, strict=True)), format)
        parts = [parts_of(published, name, format) for name in _names(entry)]
        share = linear.share(entry, [len(w) for w in whole], whole[0].shape[1])
        linear.take(parts, format, *share)
        if places.sends_to_rank_0(entry):
            linear.parts = parts


def gather_parts(module: nn.Module, places: ShardLayout, whole: Decoder | None) -> None:
    """Copies the quantized tensors of all stages into the linears of rank 0's `whole` model. Collective."""
    targets = linears(whole) if whole else {}
    for entry in _quantized(places):
        linear: Any = None
        if places.here(entry) and places.sends_to_rank_0(entry):
            linear = module.get_submodule(entry.name.removesuffix(".weight"))
        for i, name in enumerate(_names(entry)):
            if whole is None:
                for tensor in linear.parts[i].values() if linear else ():
                    dist.send(_bytes(tensor.cpu()), 0)
                continue
            target = targets[name]
            assert isinstance(target, QuantLinear)
            if linear:
                target.take(linear.parts[i])
                continue
            found = {k: torch.empty_like(v, device="cpu") for k, v in target.parts.items()}
            for tensor in found.values():
                dist.recv(_bytes(tensor), places.sender_of(entry))
            target.take({k: v.to(target.weight.device) for k, v in found.items()})


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, because not every collective supports every number format."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
