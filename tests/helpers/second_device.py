"""A device `cuda:0` without a GPU: its tensors hold CPU tensors and compute with them.

What it finds is what a CPU hides: tensors of two devices in one operation, `.numpy()` of a GPU's memory, a
generator of the other device, and every time that the host waits for the device. What it does not find:
operations and dtypes that CUDA's kernels lack, other rounding, races, memory.

    cuda = SecondDevice()
    with cuda.present():                       # torch.cuda.is_available(), torch.device("cuda") can be used
        x = torch.ones(3, device="cuda") * 2   # a Far, on any thread, with autograd and autocast
        x + torch.ones(3)                      # RuntimeError: Expected all tensors to be on the same device …
        x.tolist()
    cuda.waits                                 # Counter({"tests/…:12 _to_copy": 1})

A `Far` says `cuda:0` to Python. To C++ it is of XLA, which torch's CPU build knows by name and has no kernels
for: of CUDA, autograd would ask for streams there. Operations with a `Far` argument come by
`Far.__torch_dispatch__`; those that make tensors from nothing, or from CPU tensors alone, by kernels registered
here. Autograd wants a guard of the device, a C++ object: torch's own that does nothing, registered by two lines
that are compiled when this is first imported. That must be before the process's first backward.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from helpers.paths import ROOT
from torch import Tensor

DEVICE = torch.device("cuda", 0)
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::DeviceType;
namespace { C10_REGISTER_GUARD_IMPL(XLA, c10::impl::NoOpDeviceGuardImpl<DeviceType::XLA>) }
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_IMPLICIT = "CompositeImplicitAutograd"
_INDEXING = ("index", "index_put", "_index_put_impl", "_unsafe_index")
_FILLING = ("fill", "masked_fill", "index_fill")
_SEES_NUMBERS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Far(torch.Tensor):
    """A tensor of the second device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @staticmethod
    def __new__(cls, held: Tensor) -> "Far":
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=torch.device("xla", 0), _extra_dispatch_keys=_KEYS,
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held

    device = property(lambda self: DEVICE)  # pyright: ignore
    is_cuda = property(lambda self: True)  # pyright: ignore

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        stays = device is None or device.type == "cuda"
        if stays and dtype in (None, self.dtype) and not copy:
            return self
        return super().to(*args, copy=copy, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"Far({self.held!r})"

    # nn.Module.to exchanges parameters for tensors that say so, instead of changing their data.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Far":
        return Far(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        whole = func.decompose(*args, **kwargs or {})  # in inference mode nobody did before
        return _run(func, args, kwargs or {}) if whole is NotImplemented else whole


def same_bits(far: Tensor, near: Tensor) -> bool:
    """Whether both hold the same, each on its device."""
    assert isinstance(far, Far) and not isinstance(near, Far)
    a, b = (x.reshape(-1).view(torch.uint8) for x in (far.cpu(), near))
    return far.dtype == near.dtype and far.shape == near.shape and torch.equal(a, b)


class SecondDevice:
    """Where the host waited for the device: `FILE:LINE operation`, and how often."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()

    @contextmanager
    def present(self) -> Iterator["SecondDevice"]:
        global _watching
        names: dict[str, Any] = {
            "is_available": lambda: True, "_lazy_init": lambda: None, "device_count": lambda: 1,
            "current_device": lambda: 0, "get_device_capability": lambda *_: (8, 0),
            "get_device_name": lambda *_: "a CPU in disguise", "synchronize": lambda *_: None,
            "reset_peak_memory_stats": lambda *_: None, "max_memory_allocated": lambda *_: 0,
            "is_bf16_supported": lambda *_: True,
        }  # fmt: skip
        before, _watching = _watching, self
        try:
            with mock.patch.multiple(torch.cuda, **names):
                yield self
        finally:
            _watching = before

    def waited(self, why: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back and _foreign(frame):
            frame = frame.f_back
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        self.waits[f"{file}:{frame.f_lineno} {why}"] += 1


_watching: SecondDevice | None = None


def _foreign(frame: FrameType) -> bool:
    """Of torch, or of this file."""
    file = frame.f_code.co_filename
    return file == __file__ or not file.startswith(str(ROOT)) or "site-packages" in file


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    """`func` on what the arguments hold, if CUDA would do it."""
    name = func.overloadpacket.__name__
    tensors: list[Tensor] = []
    _each(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
    wanted = kwargs.get("device")
    if name in ("copy_", "_to_copy"):
        far = isinstance(args[0], Far) if wanted is None else wanted.type != "cpu"
    else:
        _check(func, name, args, tensors)
        far = any(isinstance(x, Far) for x in tensors) if wanted is None else wanted.type != "cpu"
    if far and kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
    if _watching and (why := _wait(func, name, args, kwargs, far)):
        _watching.waited(why)
    own_args, own = _each(_here, args), _each(_here, kwargs)
    if func is torch.ops.aten.mm.dtype:
        out = _mm_to(*own_args)
    elif far and name in ("div", "div_") and not isinstance(args[1], Far) and not kwargs:
        out = _divided(func, *own_args)
    else:
        out = func(*own_args, **own)
    written = _written(func, args, kwargs)
    return _each(partial(_back, written), out) if far else out


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """`x` with everything in its tuples, lists and dictionaries changed."""
    if isinstance(x, (tuple, list)):
        return type(x)([_each(change, y) for y in x])
    return {k: _each(change, y) for k, y in x.items()} if isinstance(x, dict) else change(x)


def _here(x: Any) -> Any:
    if isinstance(x, Far):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type in ("cuda", "xla") else x


def _written(func: Any, args: tuple, kwargs: dict) -> dict[int, Far]:
    """The arguments that `func` has written to, by what they hold."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in _outputs(func)]
    written = {id(x.held): x for x in found if isinstance(x, Far)}
    for x in written.values():
        if x.held.shape != x.shape or x.held.stride() != x.stride():
            raise NotImplementedError(f"{func} changes the shape of a tensor of the second device")
    return written


@cache
def _outputs(func: Any) -> list[tuple[int, str]]:
    """(place, name) of the arguments that are written to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _back(written: dict[int, Far], x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return written[id(x)] if id(x) in written else Far(x)


def _check(func: Any, name: str, args: tuple, tensors: list[Tensor]) -> None:
    """Raises RuntimeError, as CUDA does, where tensors of both devices meet."""
    near = [x for x in tensors if not isinstance(x, Far)]
    if "_scaled" in name and "mm" in name:
        raise RuntimeError(f"{name}: needs a compute capability of 8.9 or above")
    if name == "_int_mm" and (
        args[0].shape[0] <= 16 or args[0].shape[1] % 8 or args[1].shape[1] % 8
    ):
        raise RuntimeError(f"_int_mm: {list(args[0].shape)} · {list(args[1].shape)}")
    if len(near) in (0, len(tensors)):
        return
    if name.rstrip("_") in _INDEXING and isinstance(args[0], Far):
        indices = [x for x in args[1] if x is not None]
        near = [x for x in near if not any(x is i for i in indices)]
    # A CPU tensor of no dimension is a number to operations on elements.
    scalars = torch.Tag.pointwise in func.tags or name.rstrip("_") in (*_INDEXING, *_FILLING)
    into_near = bool(_outputs(func)) and not isinstance(args[0], Far)
    if near and (not scalars or into_near or any(x.dim() for x in near)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} got cuda:0 and cpu, "
            f"{[list(x.shape) for x in near]}"
        )


def _wait(func: Any, name: str, args: tuple, kwargs: dict, far: bool) -> str | None:
    """Why the host waits for the device in `func`, if it does."""
    if name in ("copy_", "_to_copy"):
        blocking = not kwargs.get("non_blocking") and True not in args[2:]
        source = args[name == "copy_"]
        crosses = isinstance(source, Far) != far and blocking and source.numel()
        return ("upload" if far else "read") if crosses else None
    if name.rstrip("_") in _INDEXING and isinstance(args[0], Far):
        indices = [x for x in args[1] if x is not None]
        fills = name.rstrip("_") != "index" and args[2].numel() == 1
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not fills:
            return "index by bool"
        return None if all(isinstance(x, Far) for x in indices) else "upload of an index"
    return name if _SEES_NUMBERS & set(func.tags) and not kwargs.get("output_size") else None


def _mm_to(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """torch has this for CUDA alone."""
    return torch.mm(a.to(out_dtype), b.to(out_dtype))


def _divided(func: Any, a: Tensor, number: Any) -> Tensor:
    """By a number, or a CPU's tensor of no dimension, CUDA divides as a product with its reciprocal."""
    wide = a.to(torch.promote_types(a.dtype, torch.float32))
    inverse = torch.ones((), dtype=wide.dtype) / torch.tensor(float(number), dtype=wide.dtype)
    out = (wide * inverse).to(a.dtype if a.is_floating_point() else wide.dtype)
    return a.copy_(out) if _outputs(func) else out


def _kernel(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        return _run(func, args, kwargs)

    return run


def _register() -> list[torch.library.Library]:
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "guard.cpp"), Path(directory, "guard.so")
        source.write_text(_GUARD)
        torch_here = f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10"
        command = ["c++", "-std=c++20", "-shared", "-fPIC", source, "-o", library, *torch_here]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))
    kernels = []
    makers = torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect")
    for key in ("CUDA", "XLA"):
        library = torch.library.Library("aten", "IMPL")
        for name in makers:
            implicit = torch._C._dispatch_has_kernel_for_dispatch_key(name, _IMPLICIT)
            if name.startswith("aten::") and not implicit:
                library.impl(name, _kernel(name), key)
        kernels.append(library)
    return kernels


_KERNELS = _register()
