"""Megatron's GPTModel for packed batches, built from our configuration.

Attention is replaced by ours through Megatron's layer spec: sequences of a group share their prompt's tokens,
as in areal_q/models/packed_layout.py, and there is no padding. The norms, which so need neither Apex nor
Transformer Engine, and the angles of RoPE are ours too. The division among ranks is Megatron's.
"""
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_q.config.learner import Precision
from areal_q.models import DecoderConfig, PackedLayout
from areal_q.models.layers.moe import UNRECORDED, Routing
from areal_q.models.layers.packed_attention import packed_attention
from areal_q.models.low_bit.bf16_rounding import RoundedNorm, straight
from learner.backends.megatron.layers.lora import AdapterSettings, specs
from learner.backends.megatron.layers.moe import (
    Experts,
    Router,
    SharedExpert,
    empty_report,
    make_report,
    report_of_rows,
    report_rows,
)
from learner.backends.megatron.layers.quantized_forward import QuantizedColumn, QuantizedRow
from learner.backends.megatron.tensor_names import padded
from learner.data.packing import PackedBatch


@dataclass
class Packed(PackedSeqParams):
    """Passes the layout to attention. `qkv_format` is not set, because Megatron's own packing restarts
    positions at every sequence, while ours continues them after a shared prompt."""

    layout: PackedLayout | None = None


class Attention(nn.Module):
    """Attention of this rank's heads: q [N, 1, heads, head_dim], k and v [N, 1, kv_heads, head_dim] →
    [N, 1, heads · head_dim]."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packed,
        **_: Any,
    ) -> Tensor:
        layout = packed_seq_params.layout
        assert layout is not None
        count = len(layout.positions)
        q, k, v = (x[:count].squeeze(1) for x in (query, key, value))
        out = packed_attention(q, k, v, layout).flatten(-2).unsqueeze(1)
        padding = len(query) - count
        return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out


@dataclass(frozen=True)
class Portion:
    """The tokens of a micro-batch whose hidden states this rank has between attention and experts: all of them,
    or with sequence parallelism equally many on each tensor-parallel rank. Example: 7 tokens on 2 ranks are 4,
    and 3 with one padding token."""

    first: int
    size: int
    padding: int
    """Number of padding tokens after the last token, on the last rank or on several."""

    @classmethod
    def of(cls, count: int, config: TransformerConfig) -> "Portion":
        if not config.sequence_parallel:
            return cls(0, count, 0)
        ranks = config.tensor_model_parallel_size
        size = -(-count // ranks)
        return cls(get_tensor_model_parallel_rank() * size, size, size * ranks - count)

    def routing(self, routes: Tensor | None) -> Routing:
        """Returns the routing of this portion from `routes` of all tokens, [N, L, K]."""
        if routes is not None and self.size < len(routes):
            padded = F.pad(routes, (0, 0, 0, 0, 0, self.padding), value=UNRECORDED)
            routes = padded[self.first : self.first + self.size]
        return Routing(routes)


class Norm(RoundedNorm):
    rounds_rest = False

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.rounds_rest else nn.RMSNorm.forward(self, x)


class MegatronModel(GPTModel):
    """This rank's part of a stage of the decoder.

    It computes in `precision`; unless that is "full", it cannot run before the first
    `materialise`. With `lora` only adapters are trained, and it cannot run before `load_base`.
    `rounds_rest` is explained in areal_q/models/low_bit/bf16_rounding.py."""

    replay = False
    """True if tokens go to the experts that the rollout recorded."""
    report: Tensor
    """The report of all routers about the last batch (layers/moe.py); it exists only on the last stage."""

    def __init__(
        self,
        shape: DecoderConfig,
        config: TransformerConfig,
        stage: int,
        precision: Precision = "full",
        rounds_rest: bool = False,
        lora: AdapterSettings | None = None,
    ) -> None:
        super().__init__(
            config,
            _block(shape, config, stage, precision, lora),  # type: ignore[arg-type]
            vocab_size=padded(shape.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=stage == 0,
            post_process=stage == config.pipeline_model_parallel_size - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
        )
        self.shape, self.rounds_rest = shape, rounds_rest
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        below = [layer for layer in shape.sparse_layers if layer < _layers(config, stage)[0]]
        for number, router in enumerate(self.routers, len(below)):
            assert shape.experts
            router.shape, router.layer = shape.experts, number
        for module in self.modules():
            if isinstance(module, Norm | QuantizedColumn | Router | SharedExpert):
                module.rounds_rest = rounds_rest
            if isinstance(module, QuantizedColumn | QuantizedRow):
                module.flow = precision == "jet"
        apart = config.sequence_parallel or config.expert_model_parallel_size > 1
        for name, p in self.named_parameters():
            if lora:
                p.requires_grad_(".lora_" in name)
            if ".local_experts." in name:
                # Megatron does not consider that each tensor-parallel rank has its own tokens for an expert.
                p.allreduce = not apart  # type: ignore[attr-defined]
        self.frequencies = torch.tensor(shape.inverse_frequencies(), dtype=torch.float32)

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Receives the output of the stage before, hidden states [N, 1, D] with the report below, or [None]."""
        (self._received,) = tensors

    def forward(self, batch: PackedBatch) -> Tensor:  # type: ignore[override]
        """Returns the hidden states [N, 1, D] that leave this stage: on the last one after the final norm, on
        others this rank's portion, with the routers' report below."""
        own = Portion.of(len(batch.token_ids), self.config)
        routing = own.routing(batch.routes if self.replay else None)
        for router in self.routers:
            router.routing = routing
        positions = F.pad(batch.layout.positions, (0, own.padding))
        report, x = empty_report(self.shape, positions.device), None
        if self.pre_process:
            x = self._embedded(F.pad(batch.token_ids, (0, own.padding)), positions)
        else:
            self.decoder.set_input_tensor(self._received[: own.size])
            report = report + report_of_rows(self._received[own.size :], len(report))
        angles = torch.outer(positions.float(), self.frequencies.to(positions.device))
        hidden = self.decoder(
            hidden_states=x,
            attention_mask=None,
            rotary_pos_emb=angles.repeat(1, 2)[:, None, None],
            packed_seq_params=Packed(layout=batch.layout),
        )
        if self.routers:
            report = report + make_report(routing, batch, self.shape, own.first)
        if not self.post_process:
            return torch.cat([hidden, report_rows(report, hidden)]) if len(report) else hidden
        self.report = report
        if self.config.sequence_parallel:
            # Every rank computes the same from them, and so already has their whole gradient.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[: len(batch.token_ids)]

    def _embedded(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = self._acting(self.embedding(token_ids[None], positions[None]))
        if self.config.recompute_granularity and torch.is_grad_enabled():
            # Recomputation gives a layer's parameters gradients only if its input requires one.
            x.requires_grad_()
        return x

    @property
    def head(self) -> Tensor:
        """This rank's rows of the output head, with padding, rounded as in the forward."""
        if self.share_embeddings_and_output_weights:
            return self._acting(self.shared_embedding_or_output_weight())
        return self._acting(self.output_layer.weight)

    def _acting(self, x: Tensor) -> Tensor:
        return straight(x) if self.rounds_rest else x


def _layers(config: TransformerConfig, stage: int) -> range:
    each = config.num_layers // config.pipeline_model_parallel_size
    return range(stage * each, (stage + 1) * each)


def _block(
    shape: DecoderConfig,
    config: TransformerConfig,
    stage: int,
    precision: Precision,
    lora: AdapterSettings | None,
) -> TransformerBlockSubmodules:
    dense = _layer(shape, precision, None, lora)
    sparse = _layer(shape, precision, shape.experts.count, lora) if shape.experts else dense
    layers = [sparse if i in shape.sparse_layers else dense for i in _layers(config, stage)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _layer(
    shape: DecoderConfig,
    precision: Precision,
    experts: int | None,
    lora: AdapterSettings | None = None,
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.core_attention = Attention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    mlps = [mlp]
    if experts:
        mlp.router, mlp.experts.module = Router, Experts
        mlp.shared_experts.module = SharedExpert
        mlps = [mlp.experts.submodules, mlp.shared_experts.submodules]
    if lora:
        for name, spec in specs(shape, lora).items():
            for part in (attention, *mlps):
                if hasattr(part, name):
                    setattr(part, name, spec)
    elif precision != "full":
        attention.linear_qkv, attention.linear_proj = QuantizedColumn, QuantizedRow
        for mlp in mlps:
            mlp.linear_fc1, mlp.linear_fc2 = QuantizedColumn, QuantizedRow
    return layer
