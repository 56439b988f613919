"""Translation of our settings into Megatron's; those that Megatron does not support are refused by name."""
# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_q.config import AdamW, LearnerConfig, MegatronBackend
from areal_q.errors import ConfigError
from areal_q.models import DecoderConfig
from areal_q.models.rope_scaling import turned_by


def transformer_config(
    shape: DecoderConfig, cfg: LearnerConfig, backend: MegatronBackend
) -> TransformerConfig:
    """Returns Megatron's settings of the model. Raises ConfigError if the model cannot be divided equally among
    the ranks, for variants of the decoder that Megatron's has not, or for settings that a mixture of experts
    excludes."""
    sparse: dict[str, Any] = {}
    if shape.sparse_layers:
        sparse = _sparse(shape, cfg, backend)
    for name, asked in {
        "biases of o_proj or the MLP": shape.o_bias or shape.mlp_bias,
        "sliding windows": shape.window,
        "layers without RoPE": shape.unrotated,
        "RoPE that scales its angles' sines": turned_by(shape.rope_scaling) != 1.0,
    }.items():
        if asked:
            raise ConfigError(f"learner.backend.type = megatron: not with {name}; torch has them")
    quantized = cfg.precision != "full" or cfg.lora
    for name, ranks, what, count in (
        ("tensor", backend.tensor, "key and value heads", shape.kv_heads),
        ("tensor", backend.tensor, "channels in the MLP", shape.mlp),
        ("pipeline", backend.pipeline, "layers", shape.layers),
        ("tensor", backend.tensor, "channels", shape.width if quantized else 0),
    ):
        if count % ranks:
            raise ConfigError(
                f"learner.backend.{name} = {ranks} does not divide the model's {count} {what}"
            )
    dtype = getattr(torch, cfg.products)
    recompute: dict[str, Any] = {}
    if cfg.recompute:
        recompute = {
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
        # Megatron's fusions need Apex, Transformer Engine or CUDA.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=not cfg.device.startswith("cuda"),
        # Micro-batches differ in length. Megatron then requires this dispatcher, even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=False,
        **recompute,
        **sparse,
    )


def _sparse(shape: DecoderConfig, cfg: LearnerConfig, backend: MegatronBackend) -> dict[str, Any]:
    experts = shape.experts
    assert experts
    for name, refused in {
        "learner.backend.tensor with learner.precision": backend.tensor > 1
        and cfg.precision != "full",
        "learner.dtype": cfg.products == "bfloat16",
        "learner.recompute with learner.router_aux_coef": cfg.recompute and cfg.router_aux_coef > 0,
    }.items():
        if refused:
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
        # Each tensor-parallel rank sends its own tokens to the experts.
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": backend.tensor > 1,
    }


def optimizer_config(cfg: LearnerConfig, optimizer: AdamW) -> OptimizerConfig:
    """Returns the settings of Megatron's distributed AdamW."""
    dtype = getattr(torch, cfg.products)
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
