"""Scattering of rank 0's whole policy over Megatron's ranks, and gathering of it, tensor by tensor.

    scatter   rank 0 broadcasts a tensor; each rank keeps its part, and its optimizer a range of that
    gather    all-reduce over data-parallel ranks ─▶ all-gather over tensor-parallel ones ─▶ sent to rank 0

A rank's distributed optimizer has float32 master weights and moments for a range of each flattened parameter;
the other data-parallel ranks have the rest.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from areal_q.models import Decoder, DecoderConfig
from learner.backends.megatron.tensor_names import TensorEntry

MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[Tensor], Tensor]


class ShardLayout:
    """This rank's position among the others, and the parameters of the model that it has."""

    def __init__(self, plan: Sequence[TensorEntry], module: nn.Module) -> None:
        self.plan = plan
        self.stage = ps.get_pipeline_model_parallel_rank()
        self.rank, self.size = (
            ps.get_tensor_model_parallel_rank(),
            ps.get_tensor_model_parallel_world_size(),
        )
        self.owner = ps.get_expert_model_parallel_rank()
        self.index_in_stage = self.rank + self.size * ps.get_data_parallel_rank(
            with_context_parallel=True
        )
        """This rank's number among the ranks of its stage, of which there are `ranks_in_stage`."""
        self.ranks_in_stage = self.size * ps.get_data_parallel_world_size(
            with_context_parallel=True
        )
        self.sends = self.index_in_stage == 0
        """True for the rank that sends its stage's tensors to rank 0, in whose pipeline it is."""
        self.own = dict(module.named_parameters())

    def scatter(
        self, whole: Mapping[str, Tensor] | None, shapes: Mapping[str, torch.Size]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, for each parameter of this rank, (parameter, its part of the float32 tensor in
        rank 0's `whole`). Collective."""
        for entry in self.plan:
            sources = [_spread(name, whole, shapes) for name in entry.sources]
            if self.here(entry):
                place = (self.rank, self.size) if entry.owner is None else (0, 1)
                yield self.own[entry.name], entry.part(sources, *place)

    def gather(self, read: Read, whole: Mapping[str, Tensor] | None) -> None:
        """Copies what `read` returns for each parameter, of its shape and float32, into rank 0's `whole`.
        Collective."""
        for entry in self.plan:
            if entry.copy:
                continue
            if self.here(entry):
                tensors = self.whole(entry, read)
                if whole is not None:
                    for name, t in zip(entry.sources, tensors, strict=True):
                        whole[name].copy_(t)
                elif self.sends_to_rank_0(entry):
                    for t in tensors:
                        dist.send(t.cpu(), 0)
            elif whole is not None:
                for name in entry.sources:
                    buffer = torch.empty(whole[name].shape, dtype=torch.float32)
                    dist.recv(buffer, self.sender_of(entry))
                    whole[name].copy_(buffer)

    def whole(self, entry: TensorEntry, read: Read) -> list[Tensor]:
        """Returns the whole sources of `entry`, which belongs to this stage, from what `read` returns for its
        parameter. Collective over the stage's ranks."""
        own = read(self.own[entry.name])
        parts = self.shards(own) if entry.owner is None else [own]
        return [t.contiguous() for t in entry.whole(parts)]

    def here(self, entry: TensorEntry) -> bool:
        """Returns True if this rank has the parameter of `entry`, or a part of it."""
        return entry.stage == self.stage and entry.owner in (None, self.owner)

    def sends_to_rank_0(self, entry: TensorEntry) -> bool:
        """Returns True if this rank sends `entry`, of which it has a part, to rank 0."""
        return self.sends if entry.owner is None else ps.get_expert_data_parallel_rank() == 0

    def sender_of(self, entry: TensorEntry) -> int:
        """Returns the rank that sends `entry` to rank 0. Only rank 0 may call this, as it assumes that the
        sender has the same position in its stage."""
        stage = dist.get_global_rank(ps.get_pipeline_model_parallel_group(), entry.stage)
        if entry.owner is None:
            return stage
        return stage + dist.get_global_rank(ps.get_expert_model_parallel_group(), entry.owner)

    def shards(self, own: Tensor) -> list[Tensor]:
        """Returns the parts of a parameter that tensor-parallel ranks have. Collective over them."""
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own.contiguous(), group=ps.get_tensor_model_parallel_group())
        return parts


def _spread(
    name: str, whole: Mapping[str, Tensor] | None, shapes: Mapping[str, torch.Size]
) -> Tensor:
    known = whole[name].detach().float().cpu().contiguous() if whole else None
    tensor = torch.empty(shapes[name]) if known is None else known
    dist.broadcast(tensor, 0)
    return tensor


class OptimizerState:
    """This rank's ranges of master weights and moments in Megatron's distributed optimizers, of which there is
    one for the experts that ranks share and one for all other parameters."""

    def __init__(self, optimizers: list[DistributedOptimizer]) -> None:
        self._all = optimizers

    def _slot(self, p: Tensor) -> dict[str, Tensor]:
        found = self.range_of(p)
        assert found
        (of,) = (o for o in self._all if p in o.model_param_group_index_map)
        return of.optimizer.state[found[1]]

    def range_of(self, p: Tensor) -> tuple[slice, nn.Parameter] | None:
        """Returns (this rank's range of the flattened `p`, its master weights); None if
        other ranks have all."""
        for of in self._all:
            if p in of.model_param_group_index_map:
                found = of._get_model_param_range_map(p)["param"]
                group, order = of.model_param_group_index_map[p]
                return slice(found.start, found.end), of.optimizer.param_groups[group]["params"][
                    order
                ]
        return None

    def set(self, p: Tensor, name: str, whole: Tensor) -> None:
        """Sets the master weights of `p`, for name "param", or a moment, from a tensor of the shape of `p`."""
        if (found := self.range_of(p)) is None:
            return
        part, master = found
        value = whole.flatten()[part].to(master.device)
        if name == "param":
            master.data.copy_(value)
        else:
            self._slot(p)[name] = value.clone().view_as(master)

    def set_steps(self, p: Tensor, count: Tensor) -> None:
        """Sets the number of updates of `p`; moments that are missing begin at 0."""
        if found := self.range_of(p):
            slot = self._slot(p)
            slot["step"] = count.clone()
            for name in MOMENTS:  # a parameter may be missing in the checkpoint
                slot.setdefault(name, torch.zeros_like(found[1]))

    def read(self, name: str) -> Read:
        """Returns a function that reads master weights, or a moment, of a whole parameter. That function is
        collective over data-parallel ranks."""

        def read(p: Tensor) -> Tensor:
            flat = torch.zeros(p.numel(), dtype=torch.float32, device=p.device)
            if found := self.range_of(p):
                part, master = found
                value = master if name == "param" else self._slot(p)[name]
                flat[part].copy_(value.flatten())
            shared = not getattr(p, "allreduce", True)  # Megatron's mark of experts
            everywhere = ps.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(
                flat, group=ps.get_expert_data_parallel_group() if shared else everywhere
            )
            return flat.view_as(p)

        return read

    def steps(self) -> Tensor:
        """Returns the number of updates so far, which is the same for all parameters. Collective over all
        ranks, as a rank may have no parameters."""
        slots = (slot for of in self._all for slot in of.optimizer.state.values())
        counts = [float(slot["step"]) for slot in slots if slot]
        most = torch.tensor(max(counts, default=0.0))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most


def named_moments(
    whole: nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> dict[str, Tensor]:
    """Returns rank 0's moments by the names of their parameters; moments that are missing begin at 0."""
    state = optimizer.state
    learning = ((n, p) for n, p in whole.named_parameters() if p.requires_grad)
    return {n: state[p].setdefault(name, torch.zeros_like(p)) for n, p in learning}


def shapes_of(shape: DecoderConfig) -> dict[str, torch.Size]:
    """Returns the shapes of all Hugging Face tensors, by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in Decoder(shape).named_parameters()}
