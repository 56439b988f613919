"""Megatron's GPTModel for packed batches, shaped by our configuration.

Attention is ours, through Megatron's own place for it: sequences of a group share their prompt's tokens, as
in areal_q/models/packing.py, and nothing is padded. So are the norms, which need neither Apex nor Transformer
Engine, and the angles of RoPE. All that is split among ranks is Megatron's.
"""
# pyright: reportMissingImports=false

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_q.config import AdamW, LearnerConfig, MegatronBackend
from areal_q.config.run import Precision
from areal_q.errors import ConfigError
from areal_q.models import DecoderConfig, PackedLayout
from areal_q.models.decoder import packed_attention
from areal_q.models.moe import Routing
from areal_q.models.rounding import RoundedNorm, straight
from learner.batch import PackedBatch
from learner.mcore.aligned import Column, Row
from learner.mcore.moe import Router
from learner.mcore.names import padded


@dataclass
class Packed(PackedSeqParams):
    """Carries the layout to attention. `qkv_format` stays unset: Megatron's own packing restarts positions at
    every sequence, ours continues them after a shared prompt."""

    layout: PackedLayout | None = None


class Attention(nn.Module):
    """Of this rank's heads: q [N, 1, heads, head_dim], k and v [N, 1, kv_heads, head_dim] → [N, 1, …]."""

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
        assert packed_seq_params.layout is not None
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        return packed_attention(q, k, v, packed_seq_params.layout).flatten(-2).unsqueeze(1)


class Norm(RoundedNorm):
    rounds_rest = False

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.rounds_rest else nn.RMSNorm.forward(self, x)


class Policy(GPTModel):
    """This rank's part of a stage of the decoder. Its forward is that of `precision`; unless "full", it cannot
    run before the first `materialise`. `rounds_rest`: see areal_q/models/rounding.py."""

    def __init__(
        self,
        shape: DecoderConfig,
        config: TransformerConfig,
        stage: int,
        precision: Precision = "full",
        rounds_rest: bool = False,
    ) -> None:
        first, last = stage == 0, stage == config.pipeline_model_parallel_size - 1
        super().__init__(
            config,
            _block(shape, config, precision),  # type: ignore[arg-type]
            vocab_size=padded(shape.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=shape.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",
        )
        self.shape = shape
        self.rounds_rest = rounds_rest
        self.replay = False
        """Whether experts are those that the rollout took"""
        self.routing: Routing | None = None
        """Of the last batch"""
        self.routers = [module for module in self.modules() if isinstance(module, Router)]
        for number, router in enumerate(self.routers):
            assert shape.experts
            router.shape, router.layer = shape.experts, number
        for module in self.modules():
            if isinstance(module, Norm | Column):
                module.rounds_rest = rounds_rest
            if isinstance(module, Column | Row):
                module.flow = precision == "jet"
        self.frequencies = torch.tensor(shape.inverse_frequencies(), dtype=torch.float32)

    def forward(self, batch: PackedBatch) -> Tensor:  # type: ignore[override]
        """Hidden states [N, 1, D] that leave this stage; after the final norm, if it is the last."""
        if self.routers:
            self.routing = Routing(batch.routes if self.replay else None)
            for router in self.routers:
                router.routing = self.routing
        positions = batch.layout.positions
        x = None
        if self.pre_process:
            x = self._acting(self.embedding(batch.token_ids[None], positions[None]))
        angles = torch.outer(positions.float(), self.frequencies.to(positions.device))
        return self.decoder(
            hidden_states=x,
            attention_mask=None,
            rotary_pos_emb=angles.repeat(1, 2)[:, None, None],
            packed_seq_params=Packed(layout=batch.layout),
        )

    @property
    def head(self) -> Tensor:
        """This rank's rows of the output head as it acts, the padding's among them."""
        if self.share_embeddings_and_output_weights:
            return self._acting(self.shared_embedding_or_output_weight())
        return self._acting(self.output_layer.weight)

    def _acting(self, x: Tensor) -> Tensor:
        return straight(x) if self.rounds_rest else x


def transformer_config(
    shape: DecoderConfig, cfg: LearnerConfig, backend: MegatronBackend
) -> TransformerConfig:
    """Raises ConfigError where ranks cannot share out the model equally, or for what experts do not go with."""
    sparse: dict[str, Any] = {}
    if shape.sparse_layers:
        sparse = _sparse(shape, cfg, backend)
    for name, ranks, what, count in (
        ("tensor", backend.tensor, "key and value heads", shape.kv_heads),
        ("tensor", backend.tensor, "channels in the MLP", shape.mlp),
        ("pipeline", backend.pipeline, "layers", shape.layers),
        ("tensor", backend.tensor, "channels", shape.width if cfg.precision != "full" else 0),
    ):
        if count % ranks:
            raise ConfigError(
                f"learner.backend.{name} = {ranks} does not divide the model's {count} {what}"
            )
    dtype = getattr(torch, cfg.dtype)
    again: dict[str, Any] = {}
    if cfg.recompute:
        again = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.mlp,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=backend.tensor,
        pipeline_model_parallel_size=backend.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Its fusions need Apex, Transformer Engine or CUDA.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not cfg.device.startswith("cuda"),
        # Micro-batches are of many lengths; the dispatcher is asked for even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=False,
        **again,
        **sparse,
    )


def _sparse(shape: DecoderConfig, cfg: LearnerConfig, backend: MegatronBackend) -> dict[str, Any]:
    experts = shape.experts
    assert experts
    for name, asked in {
        "learner.backend.tensor": backend.tensor > 1,
        "learner.backend.pipeline": backend.pipeline > 1,
        "learner.precision": cfg.precision != "full",
        "learner.dtype": cfg.dtype != "float32",
        "learner.recompute with learner.router_aux_coef": cfg.recompute and cfg.router_aux_coef > 0,
    }.items():
        if asked:
            raise ConfigError(f"{name}: not with a mixture of experts on backend megatron")
    if experts.count % backend.experts:
        raise ConfigError(
            f"learner.backend.experts = {backend.experts} does not divide the model's {experts.count} experts"
        )
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.mlp,
        "moe_router_topk": experts.per_token,
        "moe_layer_freq": [int(i in shape.sparse_layers) for i in range(shape.layers)],
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": backend.experts,
    }


def optimizer_config(cfg: LearnerConfig, optimizer: AdamW) -> OptimizerConfig:
    """Of Megatron's distributed AdamW."""
    dtype = getattr(torch, cfg.dtype)
    return OptimizerConfig(
        optimizer="adam",  # decoupled weight decay is its default
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=cfg.max_grad_norm,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )


def _block(
    shape: DecoderConfig, config: TransformerConfig, precision: Precision
) -> TransformerBlockSubmodules:
    dense = _layer(shape, precision, None)
    if not shape.sparse_layers:
        layers = [dense] * get_num_layers_to_build(config)
    else:
        assert shape.experts
        sparse = _layer(shape, precision, shape.experts.count)
        layers = [sparse if i in shape.sparse_layers else dense for i in range(shape.layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def _layer(shape: DecoderConfig, precision: Precision, experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = Attention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if experts:
        layer.submodules.mlp.submodules.router = Router
    if precision != "full":
        mlp = layer.submodules.mlp.submodules
        attention.linear_qkv = mlp.linear_fc1 = Column
        attention.linear_proj = mlp.linear_fc2 = Row
    return layer
