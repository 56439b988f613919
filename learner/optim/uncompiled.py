"""Optimizers without torch.compile, whose front end takes a second and 70 MiB to import."""

from collections.abc import Callable
from inspect import unwrap

import torch
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """An optimizer whose methods are torch's own, without the wrappers that keep them out of compiled programs:
    each imports torch.compile at its first call."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch.optim.AdamW, to the same bits."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        unwrap(torch.optim.AdamW.step)(self)
