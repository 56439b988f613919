"""AdamW whose moments take one byte per number: blocks of 256 numbers are scaled by their largest magnitude,
and each number is stored as the nearest of 256 values (arXiv 2110.02861).

The values are dense near 0 and cover seven decades: decade i ∈ 0…6, (10^(i-7), 10^(i-6)], is cut into 2^i equal
parts (2^(i+1) for a moment without sign), whose middles are values, as are 0 and 1. In a block with the largest
magnitude M, a moment has an error of at most 0.45 · 10^(i-6) · M / 2^(i+1): near M this is 0.7 % for the first
moment and half of that for the second. bitsandbytes has the same values and blocks in CUDA; this is plain torch
on any device.

If FSDP2 shards a parameter by rows, each rank has the codes of its rows. The blocks are still those of the
whole flattened parameter, so that moments do not depend on the number of ranks. If a shard's border cuts a
block, which cannot happen if the row length is a multiple of 256, the ranks agree on the block's largest
magnitude in one collective, with one number per border and moment.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_q.quant.activations import on
from learner.optim.dtensor import local, most_rows
from learner.optim.uncompiled import Uncompiled

BLOCK = 256
SIGNED_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The two moments; True for the one that has a sign."""
LARGEST = "_max"
"""Suffix of the state that scales a moment's blocks."""


@cache
def code_values(signed: bool) -> Tensor:
    """Returns the values of the codes, float32 [256], ascending: the dynamic tree of the paper's §2.1."""
    values = [0.0, 1.0]
    for i in range(7):
        parts = 2 ** (i if signed else i + 1)
        middles = [0.1 + 0.9 * (k + 0.5) / parts for k in range(parts)]
        values += [m * 10.0 ** (i - 6) for m in middles]
    if signed:
        values += [-v for v in values if 0 < v < 1]
    return torch.tensor(sorted(values))


def quantize(x: Tensor, signed: bool, lead: int = 0) -> tuple[Tensor, Tensor]:
    """Returns (codes uint8 [n], largest magnitude of each block float32 [⌈(lead + n)/256⌉]) of x, n float32
    numbers in any shape. The first block begins `lead` numbers before x."""
    largest = block_maxima(x, lead)
    return _encode(x, largest, signed, lead), largest


def block_maxima(x: Tensor, lead: int = 0) -> Tensor:
    """Returns the largest magnitude of each block of x, float32 [⌈(lead + n)/256⌉]."""
    flat = x.flatten()
    blocks = -(-(lead + len(flat)) // BLOCK)
    end = blocks * BLOCK - lead - len(flat)
    return torch.nn.functional.pad(flat, (lead, end)).view(blocks, BLOCK).abs().amax(-1)


def _encode(x: Tensor, largest: Tensor, signed: bool, lead: int = 0) -> Tensor:
    """Returns codes, uint8 [n], of x, whose blocks are scaled by `largest`."""
    values, flat = on(code_values(signed), x.device), x.flatten()
    scaled = flat / _spread(largest.clamp(min=torch.finfo(torch.float32).tiny), len(flat), lead)
    return torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def dequantize(codes: Tensor, largest: Tensor, signed: bool, lead: int = 0) -> Tensor:
    """Returns the numbers that the codes stand for, float32 [n]."""
    values = on(code_values(signed), codes.device)
    return values[codes.int()] * _spread(largest, len(codes), lead)


def _spread(largest: Tensor, count: int, lead: int) -> Tensor:
    return largest.repeat_interleave(BLOCK)[lead : lead + count]


class ParameterShard:
    """This rank's part of a flattened parameter and its blocks: the whole parameter, or the rows of its
    shard."""

    def __init__(self, p: Tensor) -> None:
        self.local = local(p)
        self.all_blocks = -(-p.numel() // BLOCK)
        """Number of blocks of the whole parameter."""
        self._group, starts, rank = None, [0], 0
        if self.local is not p:
            self._group = p.device_mesh.get_group()  # type: ignore[attr-defined]
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
            most = most_rows(p, size) * (p.numel() // len(p))
            starts = [min(i * most, p.numel()) for i in range(size)]
        count = self.local.numel()
        self._cut = sorted({s // BLOCK for s in starts if s % BLOCK and s < p.numel()})
        self._first, self.lead = divmod(starts[rank] if count else 0, BLOCK)
        self._blocks = -(-(self.lead + count) // BLOCK)

    def agree(self, *largest: Tensor) -> None:
        """Sets, in place, the largest magnitude of each block that lies on several ranks to the maximum over
        these. Collective."""
        if not self._cut:
            return
        own = [(i, b - self._first) for i, b in enumerate(self._cut)]
        own = [(i, b) for i, b in own if 0 <= b < self._blocks]
        at, blocks = [i for i, _ in own], [b for _, b in own]
        shared = self.local.new_zeros(len(largest), len(self._cut), dtype=torch.float32)
        for row, mine in zip(shared, largest, strict=True):
            row[at] = mine[blocks]
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        for row, mine in zip(shared, largest, strict=True):
            mine[blocks] = row[at]

    def joined(self, largest: Tensor) -> Tensor:
        """Returns the largest magnitudes of all the parameter's blocks, from those of each rank. Collective."""
        found = largest.new_zeros(self.all_blocks)
        found[self._first : self._first + self._blocks] = largest
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return found

    def own(self, largest: Tensor) -> Tensor:
        """Returns this rank's blocks from those of the whole parameter."""
        return largest[self._first : self._first + self._blocks].clone()


class AdamW8bit(Uncompiled):
    """AdamW with the arguments of torch.optim.AdamW; parameters with fewer than `small` elements have float32
    moments."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        small: int,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._small = small

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        slot, part = self.state[p], ParameterShard(p)
        if not slot:
            self._begin(slot, p, part)
        slot["step"] += 1
        weights, t, grad = part.local, float(slot["step"]), local(p.grad).float()
        (b1, b2), lr = group["betas"], group["lr"]
        mean = _get(slot, "exp_avg", part).lerp_(grad, 1 - b1)
        square = _get(slot, "exp_avg_sq", part).mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (square / (1 - b2**t)).sqrt_().add_(group["eps"])
        weights.mul_(1 - lr * group["weight_decay"])
        weights.addcdiv_(mean.to(p.dtype), denominator.to(p.dtype), value=-lr / (1 - b1**t))
        if f"exp_avg{LARGEST}" in slot:
            _put(slot, part, {"exp_avg": mean, "exp_avg_sq": square})

    def _begin(self, slot: dict[str, Tensor], p: Tensor, part: ParameterShard) -> None:
        slot["step"] = torch.tensor(0.0)
        for name in SIGNED_MOMENTS:
            if p.numel() < self._small:
                slot[name] = torch.zeros_like(p, dtype=torch.float32)
            else:
                codes = torch.zeros_like(p, dtype=torch.uint8)
                slot[name] = codes.flatten() if part.local is p else codes
                slot[f"{name}{LARGEST}"] = block_maxima(torch.zeros_like(part.local), part.lead)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the codes as they are; torch's own method would convert them to the parameters' dtype."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for index, slot in state_dict["state"].items():
            kept = {k: v.to(params[index].device, copy=True) for k, v in slot.items()}
            self.state[params[index]] = kept | {"step": kept["step"].cpu()}


def _get(slot: dict[str, Tensor], name: str, part: ParameterShard) -> Tensor:
    """Returns the moment in the shape of the shard, dequantized if it is kept as codes."""
    kept, largest = local(slot[name]), slot.get(f"{name}{LARGEST}")
    if largest is None:
        return kept
    return dequantize(kept.flatten(), largest, SIGNED_MOMENTS[name], part.lead).view(
        part.local.shape
    )


def _put(slot: dict[str, Tensor], part: ParameterShard, moments: dict[str, Tensor]) -> None:
    largest = {name: block_maxima(x, part.lead) for name, x in moments.items()}
    part.agree(*largest.values())
    for name, x in moments.items():
        slot[f"{name}{LARGEST}"] = largest[name]
        codes = _encode(x, largest[name], SIGNED_MOMENTS[name], part.lead)
        kept = local(slot[name])
        kept.copy_(codes.view(kept.shape))
