"""Muon for matrices that FSDP2 shards by rows, with the arithmetic of torch.optim.Muon.

    rows of an update, every rank ──gather──▶ its owner: Newton–Schulz of the whole ──scatter──▶ rows of a step

Only a whole matrix can be orthogonalised. Matrices are sorted by size and assigned to ranks in turn, so that
the ranks work at the same time on matrices of about the same size. Weights and momentum stay sharded; a rank
has one whole update at a time. Updates are sent in bfloat16, to which Newton–Schulz rounds them anyway: except
for the rounding of the gradients' sums, the result is that of one process.

torch.optim.Muon accepts such DTensors too, but multiplies them shard by shard, with 11 all-reduces per matrix
of partial sums that were rounded to bfloat16. On two ranks (torch 2.13, a 48×32 matrix) its step differed from
that of one process by up to 2.5 % of the largest element; hence this class.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.optim.dtensor import most_rows


class ShardedMuon(torch.optim.Muon):
    """torch.optim.Muon for two-dimensional DTensors that are sharded along the first. `step` is collective."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            learning = [p for p in group["params"] if p.grad is not None]
            learning.sort(key=lambda p: -p.numel())
            size = dist.get_world_size(learning[0].device_mesh.get_group()) if learning else 1
            for first in range(0, len(learning), size):
                self._round(learning[first : first + size], group)

    def _round(self, params: list[DTensor], group: dict[str, Any]) -> None:
        """Takes a step for at most as many matrices as there are ranks; rank i owns the i-th of them."""
        own: Tensor | None = None
        for owner, p in enumerate(params):
            whole = _gather_rows(self._update(p, group), p, owner)
            own = whole if whole is not None else own
        step = _unit_step(own, group) if own is not None else None
        for owner, p in enumerate(params):
            rows = _scatter_rows(step, p, owner)
            p.to_local().mul_(1 - group["lr"] * group["weight_decay"]).add_(rows, alpha=group["lr"])

    def _update(self, p: DTensor, group: dict[str, Any]) -> Tensor:
        """Returns this rank's rows of the update: the momentum, with Nesterov's correction."""
        assert isinstance(p.grad, DTensor)
        slot = self.state[p]
        if "momentum_buffer" not in slot:
            slot["momentum_buffer"] = torch.zeros_like(p.grad)
        momentum, grad = slot["momentum_buffer"].to_local(), p.grad.to_local()
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"])


def _unit_step(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns what torch's Muon with learning rate 1 and without momentum adds to a matrix with this update."""
    zero = nn.Parameter(torch.zeros_like(update))
    zero.grad = update
    settings = {"ns_steps": group["ns_steps"], "adjust_lr_fn": group["adjust_lr_fn"]}
    torch.optim.Muon(
        [zero], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **settings
    ).step()
    return zero.detach()


def _gather_rows(rows: Tensor, p: DTensor, owner: int) -> Tensor | None:
    """Returns the whole matrix, float32, on its owner, and None elsewhere."""
    mesh = p.device_mesh
    group, most = mesh.get_group(), most_rows(p, mesh.size())
    sent = nn.functional.pad(rows.bfloat16(), (0, 0, 0, most - len(rows))).to(mesh.device_type)
    if dist.get_rank(group) != owner:
        dist.gather(sent, group=group, group_dst=owner)
        return None
    found = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.gather(sent, found, group=group, group_dst=owner)
    return torch.cat(found)[: len(p)].float()


def _scatter_rows(whole: Tensor | None, p: DTensor, owner: int) -> Tensor:
    """Returns this rank's rows of the owner's `whole`; that of other ranks is ignored. Collective."""
    mesh, local = p.device_mesh, p.to_local()
    group, most = mesh.get_group(), most_rows(p, mesh.size())
    rows = torch.empty(most, p.shape[1], device=mesh.device_type)
    parts = None
    if dist.get_rank(group) == owner:
        assert whole is not None
        size = dist.get_world_size(group)
        padded = nn.functional.pad(whole, (0, 0, 0, most * size - len(whole)))
        parts = list(padded.split(most))
    dist.scatter(rows, parts, group=group, group_src=owner)
    return rows[: len(local)].to(local.device)
