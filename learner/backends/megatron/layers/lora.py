"""LoRA on a frozen base (areal_q/models/low_bit/lora.py), on tensor-parallel ranks.

                     AdaptedColumn: linear_qkv, linear_fc1              AdaptedRow: linear_proj, linear_fc2
    base             x ─▶ its outputs                            all-gather x ─▶ a part of y ─▶ all-gather
    A                whole; its gradient is summed over ranks    its columns
    x · Aᵀ           on every rank                               summed over ranks
    B                its rows                                    whole; every rank has all of its gradient

Each source of a fused linear has its own adapter. The base is quantized as in rollouts, and whole on every rank
of its stage, since scales and blocks extend over what several ranks compute; there is no float copy of it. A
rank computes some of the base's outputs from all of its inputs, as in quantized_forward.py.

An expert, its base and its adapters are whole on the rank that has it. Around a mixture each rank has a part of
the tokens (Megatron's sequence parallelism), which a column gathers, and a row divides again.
"""
# pyright: reportMissingImports=false

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_expert_model_parallel_rank
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load, save
from torch import Tensor, nn

from areal_q.config import Lora
from areal_q.linear.quantized_linear import Linear as Product
from areal_q.linear.registry import linear_of
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.models.low_bit.lora import A, B, adapted
from areal_q.quant.format import Parts
from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import is_quantized
from learner.backends.data_parallel import Ranks
from learner.backends.megatron.layers.quantized_forward import beside, outputs_of
from learner.backends.megatron.tensor_names import COLUMNS, ROWS, WHOLE, TensorEntry

ROW = ("linear_proj", "linear_fc2")
"""Megatron's linears whose inputs are divided among ranks; of the other two, the outputs are."""


class AdapterSettings(NamedTuple):
    """The adapters' settings, and the number format of the frozen base."""

    lora: Lora
    format: str


class _Linear(nn.Module, ABC):
    """The base class of both kinds, which Megatron builds in place of its own linears, without weights."""

    bias: nn.Parameter | None
    on = True
    """True if the adapters are applied."""
    parts: list[Parts]
    """The quantized base of each source."""
    outputs: Tensor
    """The indices of the base's outputs that this rank computes, int64, counted over the stacked sources."""

    def __init__(
        self,
        ins: int,
        outs: int,
        config: TransformerConfig,
        tp_group: torch.distributed.ProcessGroup,
        sources: Mapping[str, int],
        on_base: AdapterSettings,
        bias: bool = False,
        is_expert: bool = False,
        **_: Any,
    ) -> None:
        """`ins` and `outs` count the inputs and outputs of all ranks; `sources` says in what proportion the
        fused linears, by name, have the outputs. The group of an expert's linear is this rank alone."""
        super().__init__()
        lora, self.format = on_base
        self.group, parts = tp_group, sum(sources.values())
        self.sources = {name: outs * part // parts for name, part in sources.items()}
        """Number of outputs of each fused linear."""
        self.divides_tokens = config.sequence_parallel and not is_expert
        self.scale, self.rank = lora.alpha / lora.rank, lora.rank
        self.ins, self.outs, self.n = ins, outs, tp_group.size()
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name in sources:
            if name in lora.targets:
                self.lora_A[name], self.lora_B[name] = factors = self.factors(name)
                for factor in factors if is_expert else ():
                    # Ranks have other ranges of it, each of which counts in the gradient's norm.
                    factor.tensor_model_parallel = True  # type: ignore[attr-defined]
        frozen = nn.Parameter(torch.empty(outs // self.n), requires_grad=False)
        self.bias = frozen if bias else None

    @abstractmethod
    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns this rank's parts of A and B of source `name`."""

    def product(self) -> Product:
        return linear_of(FORMATS[self.format], self.parts).rows(self.outputs)

    def whole(self) -> Tensor:
        """Returns the base, float32 [outs, ins]."""
        return torch.cat([FORMATS[self.format].dequantize(parts) for parts in self.parts])


class AdaptedColumn(_Linear):
    """A linear whose outputs are divided among ranks: x [..., ins] → [..., this rank's outputs]."""

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        outs = self.sources[name] // self.n
        return _factor(self.rank, self.ins, shared=False), _factor(outs, self.rank, shared=True)

    def take(self, parts: list[Parts], entry: TensorEntry) -> None:
        """Sets the base; `parts` are the quantized tensors of each source of `entry`."""
        self.parts = parts
        heights, like = list(self.sources.values()), next(iter(parts[0].values()))
        self.outputs = outputs_of(entry, heights, self.n, like)[self.group.rank()]
        self._order = self.outputs.argsort().argsort()
        """The position of each of this rank's outputs among these in the order of the stacked sources."""

    def forward(self, input_: Tensor, *_: Any) -> tuple[Tensor, None]:
        if self.divides_tokens:
            whole = gather_from_sequence_parallel_region(input_, group=self.group)
        else:
            whole = copy_to_tensor_model_parallel_region(input_, self.group)
        x = whole.flatten(0, -2)
        y: Tensor = _Base.apply(x, self)  # type: ignore[assignment]
        if self.on and self.lora_A:
            y = y + self._adapters(x)[:, self._order] * self.scale
        return y.view(*whole.shape[:-1], y.shape[-1]), None

    def _adapters(self, x: Tensor) -> Tensor:
        stacked = torch.cat([straight(a) for a in self.lora_A.values()])
        low = F.linear(x, copy_to_tensor_model_parallel_region(stacked, self.group))
        lows = iter(low.split(self.rank, 1))
        outs = [
            F.linear(next(lows), straight(self.lora_B[name]))
            if name in self.lora_B
            else x.new_zeros(len(x), height // self.n)
            for name, height in self.sources.items()
        ]
        return torch.cat(outs, 1)

    # Of the base

    def base(self, x: Tensor) -> Tensor:
        return self.product()(x, self.bias)

    def weight(self) -> Tensor:
        return self.whole()[self.outputs]


class AdaptedRow(_Linear):
    """A linear whose inputs are divided among ranks: x [..., this rank's inputs] → [..., outs]. It has one
    source and no bias."""

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        ins, outs = self.ins // self.n, self.sources[name]
        return _factor(self.rank, ins, shared=True), _factor(outs, self.rank, shared=False)

    def take(self, parts: list[Parts], entry: TensorEntry) -> None:
        self.parts = parts
        device = next(iter(parts[0].values())).device
        r = self.group.rank()
        self.outputs = torch.arange(self.outs, device=device).chunk(self.n)[r]
        numbers = torch.arange(self.ins, device=device)[None]
        self.inputs = entry.part([numbers], r, self.n).flatten()

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        x = input_.flatten(0, -2)
        y: Tensor = _Base.apply(x, self)  # type: ignore[assignment]
        for name, a in self.lora_A.items() if self.on else ():
            low = F.linear(x, straight(a))
            low = reduce_from_tensor_model_parallel_region(low, self.group)
            y = y + F.linear(low, straight(self.lora_B[name])) * self.scale
        y = y.view(*input_.shape[:-1], y.shape[-1])
        if self.divides_tokens:
            y = scatter_to_sequence_parallel_region(y, group=self.group)
        return y, None

    # Of the base

    def base(self, x: Tensor) -> Tensor:
        return beside(self.product()(beside(x, self.group)), self.group)

    def weight(self) -> Tensor:
        return self.whole()[:, self.inputs]


class _Base(torch.autograd.Function):
    """The format's own linear. The backward pass dequantizes the weight again for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: AdaptedColumn | AdaptedRow) -> Tensor:
        ctx.linear = linear
        return linear.base(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.linear.weight(), None


def _factor(rows: int, columns: int, shared: bool) -> nn.Parameter:
    """Returns a factor of zeros. It is divided among ranks if `shared`; else it is the same on all of them, and
    counts once in the gradient's norm."""
    factor = nn.Parameter(torch.zeros(rows, columns))
    factor.tensor_model_parallel = shared  # type: ignore[attr-defined]
    return factor


def split(
    plan: Sequence[TensorEntry], lora: Lora | None
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Returns (trainable entries, frozen entries), without the quantized base."""
    if lora is None:
        return list(plan), []
    frozen = [entry for entry in plan if not is_quantized(entry.sources[0])]
    return [a for entry in _packed(plan) for a in _adapters(entry, lora)], frozen


def _packed(plan: Sequence[TensorEntry]) -> Iterator[TensorEntry]:
    return (entry for entry in plan if is_quantized(entry.sources[0]))


def _adapters(entry: TensorEntry, lora: Lora) -> Iterator[TensorEntry]:
    rules = (COLUMNS, WHOLE) if entry.name.split(".")[-2] in ROW else (WHOLE, ROWS)
    for source in entry.sources:
        linear = source.removesuffix(".weight")
        child = linear.rpartition(".")[2]
        for factor, (part, whole) in zip((A, B), rules, strict=True):
            if child in lora.targets:
                own = entry.name.removesuffix("weight") + factor.replace("weight", child)
                sources = (f"{linear}.{factor}",)
                yield replace(entry, name=own, sources=sources, part=part, whole=whole)


def with_adapters(shapes: Mapping[str, torch.Size], lora: Lora | None) -> dict[str, torch.Size]:
    """Returns the shapes of a model's float tensors, in their order, from those of a model without adapters."""
    found: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if lora is None or not is_quantized(name):
            found[name] = shape
            continue
        linear = name.removesuffix(".weight")
        if linear.rpartition(".")[2] in lora.targets:
            found[f"{linear}.{A}"] = torch.Size([lora.rank, shape[1]])
            found[f"{linear}.{B}"] = torch.Size([shape[0], lora.rank])
    return found


def specs(shape: DecoderConfig, on: AdapterSettings) -> dict[str, ModuleSpec]:
    """Returns the specs of the linears of attention, of an MLP and of an expert, by Megatron's names."""
    sources = {
        "linear_qkv": {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads},
        "linear_proj": {"o_proj": 1},
        "linear_fc1": {"gate_proj": 1, "up_proj": 1},
        "linear_fc2": {"down_proj": 1},
    }
    return {
        name: ModuleSpec(
            AdaptedRow if name in ROW else AdaptedColumn, {"sources": fused, "on_base": on}
        )
        for name, fused in sources.items()
    }


def load_base(
    modules: Sequence[nn.Module],
    plan: Sequence[TensorEntry],
    stage: int,
    ranks: Ranks,
    whole: Decoder | None,
    device: str,
) -> None:
    """Sends rank 0's quantized base to all `ranks`; this stage's `modules` share one copy of it. Collective."""
    theirs = adapted(whole) if whole else {}
    for entry in _packed(plan):
        found = []
        for name in entry.sources:
            own = theirs[name.removesuffix(".weight")].parts if whole else {}
            data = save({k: v.cpu().contiguous() for k, v in own.items()}) if whole else b""
            found.append({k: v.to(device) for k, v in load(ranks.broadcast(data)).items()})
        here = entry.stage == stage and entry.owner in (None, get_expert_model_parallel_rank())
        for module in modules if here else ():
            linear = module.get_submodule(entry.name.removesuffix(".weight"))
            assert isinstance(linear, AdaptedColumn | AdaptedRow)
            linear.take(found, entry)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """A context in which adapters are not applied and no routes are replayed, so that the MegatronModel is the
    reference policy without a copy."""
    linears = [m for m in model.modules() if isinstance(m, AdaptedColumn | AdaptedRow)]
    replay, model.replay = model.replay, False
    for linear in linears:
        linear.on = False
    try:
        yield
    finally:
        model.replay = replay
        for linear in linears:
            linear.on = True
