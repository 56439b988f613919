"""LoRA on a frozen quantized base (QeRL §3.1; Hu et al., arXiv 2106.09685).

    y = base(x) + (alpha / r) · (x · Aᵀ) · Bᵀ + b        A [r, in], B [out, r]; B starts at 0

The base is what the rollouts' format makes of the weights once, before training: its parts are buffers
and stay packed in memory; no float copy of it is kept. Adapters are
float32, and act and are published in bfloat16, rounded on both sides alike. They alone have a gradient, which
reaches x through the dequantized base. A version's codes and scales never change, so that its delta holds
the adapters alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.config import Lora
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.models.low_bit.quantized_forward import as_engines_compute, linears
from areal_q.quant.format import Parts
from areal_q.quant.quantized_linear import Linear
from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import parts_of, quantize_state

A, B = "lora_A.weight", "lora_B.weight"
"""Suffixes of a linear's adapters, as PEFT names them."""
LORA_SCALE = "lora_scale"
"""In a manifest's `extra`: alpha / r."""


def is_adapter(name: str) -> bool:
    """Returns True if the published tensor `name` is an A or a B."""
    return name.endswith((A, B))


class _Factor(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _buffer(suffix: str) -> str:
    """A buffer's name holds no dot, such as nf4's `weight.absmax` has."""
    return suffix.replace(".", "/")


class LoraLinear(nn.Module):
    """A frozen linear in `format` with an adapter; buffers are the parts."""

    bias: Tensor | None

    def __init__(self, parts: Parts, format: str, bias: Tensor | None, cfg: Lora | None) -> None:
        """`cfg` None: without an adapter."""
        super().__init__()
        self.format, self.on = format, cfg is not None
        for suffix in FORMATS[format].suffixes:
            self.register_buffer(_buffer(suffix), parts[suffix])
        self.register_buffer("bias", bias)
        if cfg is None:
            return
        self.scale = cfg.alpha / cfg.rank
        out_features, in_features = FORMATS[format].dequantize(parts).shape
        device = next(iter(parts.values())).device
        self.lora_A = _Factor(torch.randn(cfg.rank, in_features, device=device) / in_features**0.5)
        self.lora_B = _Factor(torch.zeros(out_features, cfg.rank, device=device))

    @property
    def parts(self) -> Parts:
        return {suffix: getattr(self, _buffer(suffix)) for suffix in FORMATS[self.format].suffixes}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Base.apply(x, self)  # type: ignore[assignment]
        if self.on:
            low = F.linear(x, straight(self.lora_A.weight))
            y = y + F.linear(low, straight(self.lora_B.weight)) * self.scale
        return y

    @property
    def has_adapter(self) -> bool:
        return hasattr(self, "lora_A")

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns A and B as they act, float32."""
        return straight(self.lora_A.weight), straight(self.lora_B.weight)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """float32 [out, in]: the base, and the adapter if it is on, in one weight."""
        weight = FORMATS[self.format].dequantize(self.parts)
        if not self.on:
            return weight
        a, b = self.factors()
        return weight + b @ a * self.scale


class _Base(torch.autograd.Function):
    """The format's own linear; x's gradient through the dequantized weight, made again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LoraLinear) -> Tensor:
        kind = x.device.type
        ctx.linear = linear
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with as_engines_compute(kind):
            return FORMATS[linear.format].linear([linear.parts])(x.float(), linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        linear: LoraLinear = ctx.linear
        with torch.autocast(*ctx.autocast):
            return grads[0] @ FORMATS[linear.format].dequantize(linear.parts), None


def adapt(model: nn.Module, format: str, cfg: Lora, seed: int) -> None:
    """Freezes `model`, quantizes the linears that a format applies to, and gives those of `cfg.targets`
    adapters. Deterministic in `seed`."""
    model.requires_grad_(False)
    found = linears(model)
    published = quantize_state({f"{n}.weight": m.weight for n, m in found.items()}, format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, linear in found.items():
            bias = None if linear.bias is None else linear.bias.detach()
            parent, _, child = name.rpartition(".")
            mine = cfg if child in cfg.targets else None
            new = LoraLinear(parts_of(published, name, format), format, bias, mine)
            setattr(model.get_submodule(parent), child, new)


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Returns the frozen linears of `model`, by name; none where it was not given adapters."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base alone: the reference policy, without a second copy of the model."""
    layers = [m for m in adapted(model).values() if m.on]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns a plain decoder's state: base and adapters in one float32 weight for each linear."""
    layers, state = adapted(model), {}
    for name, tensor in model.state_dict().items():
        owner = next((n for n in layers if name.startswith(f"{n}.")), None)
        if owner is None or name.endswith(".bias"):
            state[name] = tensor
        else:
            state[f"{owner}.weight"] = layers[owner].merged()
    return state


Adapter = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r], float32."""


def adapter_of(tensors: Mapping[str, Tensor], linear: str) -> Adapter | None:
    if f"{linear}.{A}" not in tensors:
        return None
    return tensors[f"{linear}.{A}"].float(), tensors[f"{linear}.{B}"].float()


class AdaptedLinear:
    """What an engine runs: y = base(x) + scale · (x · Aᵀ) · Bᵀ, where A stacks the adapters of linears that
    it fuses, and B has theirs on its diagonal."""

    def __init__(
        self, base: Linear, adapters: Sequence[Adapter | None], outs: Sequence[int], scale: float
    ) -> None:
        """`outs`: features of each of the fused linears; None is one without an adapter."""
        self.base = base
        self.a = torch.cat([pair[0] for pair in adapters if pair])
        ranks = [pair[1].shape[1] if pair else 0 for pair in adapters]
        blocks = [
            pair[1] if pair else self.a.new_zeros(out, 0)
            for pair, out in zip(adapters, outs, strict=True)
        ]
        self.b = self.a.new_zeros(sum(outs), sum(ranks))
        row = column = 0
        for block in blocks:
            self.b[row : row + block.shape[0], column : column + block.shape[1]] = block * scale
            row, column = row + block.shape[0], column + block.shape[1]

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.base(x, add).addmm_(F.linear(x, self.a), self.b.t())
