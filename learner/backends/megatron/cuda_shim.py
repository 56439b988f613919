"""A CPU substitute for CUDA, which Megatron names explicitly in many places.

It acts only on machines without CUDA, and only inside `cuda_or_cpu`. It is tested over gloo with Megatron's
schedules, DDP and distributed optimizer, tensor and pipeline parallel.
"""
# pyright: reportMissingImports=false

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Makes `device="cuda"` and `.cuda()` mean the CPU, and reports the type of a CPU tensor as CUDA's."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


class _Stream:
    """A substitute for a CUDA stream, in which everything is done at once and in order."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None: ...


_STREAM = _Stream()


def _as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextmanager
def cuda_or_cpu() -> Iterator[None]:
    """A context in which Megatron's code runs on machines with and without CUDA."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    stands_for = {
        (torch.cuda, "current_device"): lambda: torch.device("cpu"),
        (torch.cuda, "get_rng_state"): lambda *_: torch.get_rng_state(),
        (torch.cuda, "synchronize"): lambda *_, **__: None,
        (torch.cuda, "Stream"): lambda *_, **__: _STREAM,
        (torch.cuda, "current_stream"): lambda *_, **__: _STREAM,
        (torch.cuda, "stream"): nullcontext,
        (token_dispatcher, "maybe_move_tensor_to_cpu"): _as_asked,
        (random, "_get_cuda_rng_state"): lambda *_, **__: torch.get_rng_state(),
        (random, "_set_cuda_rng_state"): lambda state, *_, **__: torch.set_rng_state(state),
    }
    with ExitStack() as stack:
        for (module, name), function in stands_for.items():
            stack.enter_context(patch.object(module, name, function))
        stack.enter_context(_OnCpu())
        yield
