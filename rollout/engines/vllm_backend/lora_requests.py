"""LoRA adapters (areal_q/models/low_bit/lora.py) in vLLM, by its own LoRA: the rollout worker's side.

    launch: checkpoint of the base ─▶ vLLM with room for one adapter ─▶ first version: stage ─▶ swap
    update: stage ─▶ pause ─▶ swap: the tensors of that one adapter are replaced ─▶ resume

All requests name the same adapter, so that those in flight go on with its new tensors. The base stays; only its
norms, which AQN draws anew, are loaded again with a version. The side of vLLM's worker is worker_lora.py.

Of a mixture of experts adapters are added to the weights, in float32, all of which are loaded with a version:
with its LoRA vLLM computes experts by Triton alone, also those that have no adapters
(`select_unquantized_moe_backend`), and none of its classes of experts for a CPU takes any.
"""

# pyright: reportMissingImports=false

from dataclasses import replace
from typing import Any

from areal_q.config.engines import VLLM_RANKS
from areal_q.errors import WeightVersionError
from areal_q.messages import Manifest
from areal_q.models import DecoderConfig
from areal_q.models.low_bit.lora import A, B, is_adapter
from areal_q.quant.kv_scales import NAMES
from areal_q.weights.version import WeightVersion

ADAPTER = 1
"""Number of the only adapter in vLLM"""


def has_adapters(manifest: Manifest) -> bool:
    return any(is_adapter(spec.name) for spec in manifest.tensors)


def runs_apart(manifest: Manifest) -> bool:
    """Returns True if there are adapters, and vLLM's LoRA runs them; else they are added to the weights."""
    return has_adapters(manifest) and not DecoderConfig.from_hf(manifest.model).sparse_layers


def engine_arguments(manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of vLLM's AsyncEngineArgs for versions with the adapters of `manifest`. Raises
    WeightVersionError for a rank that vLLM does not support."""
    if not runs_apart(manifest):
        return {}
    ranks = {
        s.name.removesuffix(f".{A}"): s.shape[0] for s in manifest.tensors if s.name.endswith(A)
    }
    largest = max(ranks.values())
    if largest > VLLM_RANKS[-1]:
        raise WeightVersionError(
            f"version {manifest.version}: adapters of rank {largest}, vLLM takes {VLLM_RANKS[-1]} at most"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= largest),
        "lora_target_modules": sorted({linear.rpartition(".")[2] for linear in ranks}),
    }


def lora_request(manifest: Manifest) -> Any:
    """Returns the LoRARequest that goes with every request to vLLM; None if its LoRA runs no adapters."""
    if not runs_apart(manifest):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("areal_q", ADAPTER, "none: it is staged")


def without_adapters(weights: WeightVersion) -> WeightVersion:
    """Returns `weights` without the adapters' tensors, for a checkpoint of the base. The manifest still names
    them."""
    base = {name: t for name, t in weights.tensors.items() if not is_adapter(name)}
    return replace(weights, tensors=base)


def check_adapters(weights: WeightVersion, first: Manifest | None) -> None:
    """Raises WeightVersionError if only one of `weights` and `first` has adapters, or their bases differ."""
    manifest = weights.manifest
    if first is None:
        return
    where = f"version {manifest.version}"
    if has_adapters(manifest) != has_adapters(first):
        raise WeightVersionError(f"{where}: only one of it and the first version has adapters")
    if has_adapters(first) and (moved := _frozen(first) ^ _frozen(manifest)):
        raise WeightVersionError(f"{where}: the base is frozen, but {min(moved)[0]} is another")


def _frozen(manifest: Manifest) -> set[tuple[str, str]]:
    """Returns the names and digests of the tensors that no version changes."""
    free = (A, B, "norm.weight", *(f".self_attn.{name}" for name in NAMES))
    return {(s.name, s.digest) for s in manifest.tensors if not s.name.endswith(free)}
