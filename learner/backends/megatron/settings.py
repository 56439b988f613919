"""Translation of our settings into Megatron's; areal_q/checks/combinations.py refuses what it does not have."""
# pyright: reportMissingImports=false

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_q.config import AdamW, LearnerConfig, MegatronBackend
from areal_q.models import DecoderConfig

_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def transformer_config(
    shape: DecoderConfig, cfg: LearnerConfig, backend: MegatronBackend
) -> TransformerConfig:
    """Returns Megatron's settings of the model."""
    dtype = getattr(torch, cfg.products)
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
        context_parallel_size=backend.context,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not cfg.device.startswith("cuda"),
        # Micro-batches differ in length. Megatron then requires this dispatcher, even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_sync=False,
        **(_RECOMPUTE if cfg.recompute else {}),
        **(_sparse(shape, backend) if shape.sparse_layers else {}),
    )


def _sparse(shape: DecoderConfig, backend: MegatronBackend) -> dict[str, Any]:
    experts = shape.experts
    assert experts
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.mlp,
        "moe_router_topk": experts.per_token,
        "moe_shared_expert_intermediate_size": experts.shared,
        "moe_shared_expert_gate": experts.shared is not None,
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
        lr=optimizer.rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=cfg.max_grad_norm,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )
