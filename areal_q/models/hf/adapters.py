"""Writes adapters in the layout of Hugging Face's PEFT, and the base that they belong to.

    hf/       base and adapters merged: a plain model
    base/     the frozen base alone, dequantized from its format
    adapter/  adapter_config.json, adapter_model.safetensors

UAQ's scale is removed: norms are divided by it, and the linear layers after them, and the A of their adapters,
multiplied.
"""

import json
import logging
from pathlib import Path

import torch

from areal_q.config import Lora
from areal_q.models.decoder import Decoder
from areal_q.models.foreign import TRANSPOSED
from areal_q.models.hf.checkpoint import new_decoder, save_decoder
from areal_q.models.low_bit.lora import adapted, adapters_off, merged_state
from areal_q.quant.rescaling import fold_back
from areal_q.system.files import replacing, save_tensors
from areal_q.tasks.base import Tokenizer

logger = logging.getLogger(__name__)
_BEHIND_A_NORM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def save_adapted(
    model: Decoder,
    directory: Path,
    cfg: Lora,
    uaq_scale: float,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype = torch.float32,
    source: str | Path | None = None,
) -> None:
    """Writes `hf/`, `base/` and `adapter/` into `directory`. `source` and the `dtype` of hf/ are as for
    `save_decoder`. The base is float32, since the adapters were trained on these very numbers."""
    with replacing(directory / "adapter") as adapter:  # first, as it is all that was learnt
        adapter.mkdir(parents=True)
        _write_adapter(model, adapter, directory / "base", cfg, uaq_scale)
    save_decoder(_plain(model, uaq_scale), directory / "hf", tokenizer, dtype, source)
    with adapters_off(model):
        base = _plain(model, uaq_scale)
        save_decoder(base, directory / "base", tokenizer, source=source)


def _write_adapter(
    model: Decoder, directory: Path, base: Path, cfg: Lora, uaq_scale: float
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    targets: dict[str, None] = {}  # a set in this order
    for name, linear in adapted(model).items():
        if not linear.has_adapter:
            continue
        targets[name.rpartition(".")[2]] = None
        scale = uaq_scale if name.endswith(_BEHIND_A_NORM) else 1.0
        a, b = linear.factors()
        tensors[f"base_model.model.{name}.lora_A.weight"] = (a * scale).contiguous().cpu()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous().cpu()
    save_tensors(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": cfg.rank,
        "lora_alpha": cfg.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": model.config.family in TRANSPOSED,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not {"gate_proj", "up_proj", "down_proj"}.isdisjoint(targets) and _is_taken_in_part(model):
        logger.warning(
            "adapter/: PEFT takes a part of it only for a %s with such layers; hf/ has all, merged",
            model.config.family,
        )


def _is_taken_in_part(model: Decoder) -> bool:
    """Returns True for a mixture that is not Qwen3-MoE's with experts in each layer: of others PEFT 0.21 adapts
    either the experts, which it holds in one tensor, or the linears of the same names beside them."""
    config = model.config
    whole = config.family == "qwen3_moe" and len(config.sparse_layers) == config.layers
    return not whole and any(".experts." in name for name in model.state_dict())


def _plain(model: Decoder, uaq_scale: float) -> Decoder:
    """Returns a decoder with plain linear layers that computes the same function as `model`, without UAQ's
    scale."""
    plain = new_decoder(model.config)
    plain.load_state_dict(merged_state(model))
    if uaq_scale > 1:
        fold_back(plain, uaq_scale)
    return plain
