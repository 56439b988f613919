"""Functions that both backends use, vLLM and SGLang, which start from a checkpoint of the first version."""

import logging
import uuid
from pathlib import Path

from safetensors import SafetensorError

from areal_q.errors import CheckpointError, ConfigError, EngineDied, WeightVersionError
from areal_q.messages import Manifest
from areal_q.models.hf.quantized import QUANTIZATION_CONFIGS, write_checkpoint
from areal_q.weights.version import WeightVersion

logger = logging.getLogger(__name__)

UNQUANTIZED = ("UnquantizedLinearMethod",)
GATES = (".mlp.gate", ".mlp.shared_expert_gate")


def check_weights(weights: WeightVersion, first: Manifest | None) -> None:
    """Raises WeightVersionError for weights that an engine which started with `first` cannot load: they are of
    another model or format, or lack a tensor."""
    manifest = weights.manifest
    where = f"version {manifest.version}"
    if manifest.format not in QUANTIZATION_CONFIGS:
        known = ", ".join(QUANTIZATION_CONFIGS)
        raise WeightVersionError(f"{where}: format {manifest.format!r} is none of {known}")
    if first is None:
        return
    if (manifest.model, manifest.format) != (first.model, first.format):
        raise WeightVersionError(f"{where} is of another model or format")
    # The engine would load half of a fused layer (q without k and v) and not complain.
    if lacking := _shapes(first) - _shapes(manifest):
        raise WeightVersionError(f"{where} lacks {min(lacking)[0]}, or has it in another shape")


def write_version(weights: WeightVersion, directory: Path) -> None:
    """Writes a checkpoint of `weights` into `directory`, which exists. Raises WeightVersionError for weights
    that make none, and ConfigError where there is no room for it."""
    manifest = weights.manifest
    try:
        write_checkpoint(weights.tensors, manifest.format, manifest.model, directory)
    except (CheckpointError, KeyError) as error:
        raise WeightVersionError(f"version {manifest.version}: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{directory}: the weights cannot be handed to the engine there: {error}"
        ) from error


def check_quantized(engine: str, linears: dict[str, str], format: str) -> None:
    """Raises EngineDied if a linear layer is not computed as the format says. An engine may start without
    complaint with quantized settings and stay in full precision. `linears` maps the name of each layer to the
    class that computes it; a mixture's routers and gates are never quantized."""
    linears = {name: how for name, how in linears.items() if not name.endswith(GATES)}
    wrong = [name for name, how in linears.items() if (how in UNQUANTIZED) != (format == "bf16")]
    if wrong or not linears:
        how = linears[wrong[0]] if wrong else "nothing"
        raise EngineDied(f"format {format}: {engine} runs {wrong[:1]} as {how}")
    logger.info("%s runs %s by %s", engine, format, ", ".join(sorted(set(linears.values()))))


def version_stamp(manifest: Manifest) -> str:
    """Returns the text by which an engine marks the tokens drawn with a version: its number and digest."""
    return f"{manifest.version}:{manifest.digest}"


def fresh_salt() -> str:
    """Returns a new random salt for the prefix cache, one for each loading of weights. The version would not
    do: it is loaded a second time when a learner goes back to a checkpoint, and by then a request that waited
    during a swap may have cached keys and values of newer weights under the old salt."""
    return uuid.uuid4().hex


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def is_hopper() -> bool:
    import torch

    return has_gpu() and torch.cuda.get_device_capability() == (9, 0)


def _shapes(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors}
