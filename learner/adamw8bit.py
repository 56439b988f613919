"""AdamW whose moments take a byte each: blocks of 256 numbers, scaled by the block's largest, each stored as
the nearest of 256 values (arXiv 2110.02861).

The values stand dense near 0, over seven decades: decade i ∈ 0…6, (10^(i-7), 10^(i-6)], is cut into 2^i equal
parts (2^(i+1) where there is no sign) whose middles are values, besides 0 and 1. So a moment x of a block with
the largest magnitude M is off by at most 0.45 · 10^(i-6) · M / 2^(i+1): near M by 0.7 %, of the second moment
by half that. bitsandbytes has the same values and blocks in CUDA; this is plain torch, on any device.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Whether it has a sign"""


@cache
def code_values(signed: bool) -> Tensor:
    """float32 [256], ascending; the dynamic tree of the paper's §2.1."""
    values = [0.0, 1.0]
    for i in range(7):
        parts = 2 ** (i if signed else i + 1)
        middles = [0.1 + 0.9 * (k + 0.5) / parts for k in range(parts)]
        values += [m * 10.0 ** (i - 6) for m in middles]
    if signed:
        values += [-v for v in values if 0 < v < 1]
    return torch.tensor(sorted(values))


def quantize(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 of any shape → (codes uint8 [n], largest magnitude of each block float32 [⌈n/256⌉])."""
    values = code_values(signed).to(x.device)
    flat = x.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(-1)
    scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2)
    return codes.to(torch.uint8).view(-1)[: len(flat)], largest


def dequantize(codes: Tensor, largest: Tensor, signed: bool) -> Tensor:
    """float32 [n]"""
    values = code_values(signed).to(codes.device)
    return values[codes.int()] * largest.repeat_interleave(BLOCK)[: len(codes)]


class AdamW8bit(torch.optim.Optimizer):
    """The arguments of torch.optim.AdamW; parameters of fewer than `small` elements keep float32 moments."""

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
        slot = self.state[p]
        if not slot:
            slot["step"] = torch.tensor(0.0)
            for name, signed in MOMENTS.items():
                self._put(slot, name, torch.zeros_like(p, dtype=torch.float32), signed)
        slot["step"] += 1
        t, grad = float(slot["step"]), p.grad.float()
        (b1, b2), lr = group["betas"], group["lr"]
        mean = self._get(slot, "exp_avg", p).lerp_(grad, 1 - b1)
        square = self._get(slot, "exp_avg_sq", p).mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = (square / (1 - b2**t)).sqrt_().add_(group["eps"])
        p.mul_(1 - lr * group["weight_decay"])
        p.addcdiv_(mean.to(p.dtype), denominator.to(p.dtype), value=-lr / (1 - b1**t))
        self._put(slot, "exp_avg", mean, True)
        self._put(slot, "exp_avg_sq", square, False)

    def _get(self, slot: dict[str, Tensor], name: str, p: Tensor) -> Tensor:
        largest = slot.get(f"{name}_max")
        if largest is None:
            return slot[name]
        return dequantize(slot[name], largest, MOMENTS[name]).view(p.shape)

    def _put(self, slot: dict[str, Tensor], name: str, x: Tensor, signed: bool) -> None:
        if x.numel() < self._small:
            slot[name] = x
        else:
            slot[name], slot[f"{name}_max"] = quantize(x, signed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own would turn codes into numbers of the parameters' dtype."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for index, slot in state_dict["state"].items():
            kept = {k: v.to(params[index].device, copy=True) for k, v in slot.items()}
            self.state[params[index]] = kept | {"step": kept["step"].cpu()}
