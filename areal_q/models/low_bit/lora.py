"""LoRA on a frozen quantized base (QeRL §3.1; Hu et al., arXiv 2106.09685).

    y = base(x) + (alpha / r) · (x · Aᵀ) · Bᵀ + b        A [r, in], B [out, r]; B starts at 0

The base is quantized once, before training, to the rollouts' format. Its codes and scales are buffers that stay
packed in memory, without a float copy. The adapters are float32 parameters, which learner and engine use
rounded to bfloat16, as they are published. Only they have a gradient; that of x goes through the dequantized
base. Since the base never changes, a delta between versions contains the adapters alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.config import Lora
from areal_q.linear.quantized_linear import Linear
from areal_q.linear.registry import linear_of
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.models.low_bit.quantized_forward import as_engines_compute, linears
from areal_q.quant.format import Parts
from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import parts_of, quantize_state

if TYPE_CHECKING:
    from areal_q.models.decoder import Decoder

A, B = "lora_A.weight", "lora_B.weight"
"""Suffixes of the names of a linear layer's adapters, as in PEFT"""
LORA_SCALE = "lora_scale"
"""Key of alpha / r in a manifest's `extra`"""


def is_adapter(name: str) -> bool:
    """Returns True if the published tensor `name` is an A or a B."""
    return name.endswith((A, B))


class _Factor(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _buffer(suffix: str) -> str:
    """Returns the name of the buffer for a tensor such as nf4's `weight.absmax`, since a buffer's name must not
    have a dot."""
    return suffix.replace(".", "/")


class LoraLinear(nn.Module):
    """A frozen linear layer in `format`, with an adapter. Its codes and scales are buffers."""

    bias: Tensor | None
    rounds_rest = False  # what is frozen beside it is rounded once, by `round_frozen`

    def __init__(self, parts: Parts, format: str, bias: Tensor | None, cfg: Lora | None) -> None:
        """Builds the layer from its codes and scales `parts`; without an adapter if `cfg` is None."""
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
        rows = x.flatten(0, -2)  # transformers' own layers hand over padded rows
        y: Tensor = _Base.apply(rows, self)  # type: ignore[assignment]
        if self.on:
            low = F.linear(rows, straight(self.lora_A.weight))
            y = y + F.linear(low, straight(self.lora_B.weight)) * self.scale
        return y.unflatten(0, x.shape[:-1])

    @property
    def has_adapter(self) -> bool:
        return hasattr(self, "lora_A")

    @torch.no_grad()
    def factors(self) -> tuple[Tensor, Tensor]:
        """Returns A and B as the forward pass uses them: rounded to bfloat16, in float32."""
        return straight(self.lora_A.weight), straight(self.lora_B.weight)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Returns one weight, float32 [out, in], for the base and, if it is on, the adapter."""
        weight = FORMATS[self.format].dequantize(self.parts)
        if not self.on:
            return weight
        a, b = self.factors()
        return weight + b @ a * self.scale


class _Base(torch.autograd.Function):
    """Computes the format's own linear layer. The gradient of x goes through the weight, which is dequantized
    again for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: LoraLinear) -> Tensor:
        kind = x.device.type
        ctx.linear = linear
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with as_engines_compute(kind):
            return linear_of(FORMATS[linear.format], [linear.parts])(x.float(), linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        linear: LoraLinear = ctx.linear
        with torch.autocast(*ctx.autocast):
            return grads[0] @ FORMATS[linear.format].dequantize(linear.parts), None


def adapt(model: "Decoder", format: str, cfg: Lora, seed: int) -> None:
    """Freezes `model`, quantizes the linear layers that a format applies to, and gives adapters to those that
    `cfg` names. The result depends on `seed` and the weights alone."""
    model.requires_grad_(False)
    found, every = linears(model), cfg.every(model.config.foreign is not None)
    published = quantize_state({f"{n}.weight": m.weight for n, m in found.items()}, format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, linear in found.items():
            bias = None if linear.bias is None else linear.bias.detach()
            parent, _, child = name.rpartition(".")
            mine = cfg if every or child in cfg.targets else None
            new = LoraLinear(parts_of(published, name, format), format, bias, mine)
            setattr(model.get_submodule(parent), child, new)


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Returns the frozen linear layers of `model` by name; none if `adapt` was not called for it."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turns the adapters off within this context. The base alone is the reference policy, without a second copy
    of the model."""
    layers = [m for m in adapted(model).values() if m.on]
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a plain decoder, with base and adapter in one float32 weight for each linear
    layer."""
    layers, state = adapted(model), {}
    for name, tensor in model.state_dict().items():
        owner = next((n for n in layers if name.startswith(f"{n}.")), None)
        if owner is None or name.endswith(".bias"):
            state[name] = tensor
        else:
            state[f"{owner}.weight"] = layers[owner].merged()
    return state


Adapter = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r], float32"""


def adapter_of(tensors: Mapping[str, Tensor], linear: str) -> Adapter | None:
    if f"{linear}.{A}" not in tensors:
        return None
    return tensors[f"{linear}.{A}"].float(), tensors[f"{linear}.{B}"].float()


def with_adapters_added(
    tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yields a version's tensors by name, those that have adapters in float32 with these added. `extra` is its
    manifest's, and the base is not quantized."""
    for name, tensor in tensors.items():
        if pair := adapter_of(tensors, name.removesuffix(".weight")):
            yield name, tensor.float() + pair[1] @ pair[0] * float(extra[LORA_SCALE])
        elif not is_adapter(name):
            yield name, tensor


class AdaptedLinear:
    """A linear layer of the reference engine with adapters: y = base(x) + scale · (x · Aᵀ) · Bᵀ. If it fuses
    several linear layers, A stacks their adapters and B has them as blocks on its diagonal."""

    def __init__(
        self, base: Linear, adapters: Sequence[Adapter | None], outs: Sequence[int], scale: float
    ) -> None:
        """Builds the layer from `base`. `adapters` and `outs` have, for each of the fused linear layers, its
        adapter (None if it has none) and its number of output features."""
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
