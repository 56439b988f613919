"""Shared by the backends that serve a checkpoint of the first version: vLLM and SGLang."""

import logging
import uuid
from pathlib import Path

from areal_q.errors import CheckpointError, EngineDied, WeightVersionError
from areal_q.messages import Manifest
from areal_q.models.hf.quantized import QUANTIZATION_CONFIGS, write_checkpoint
from areal_q.weights.version import WeightVersion

logger = logging.getLogger(__name__)

UNQUANTIZED = ("UnquantizedLinearMethod",)


def check_weights(weights: WeightVersion, first: Manifest | None) -> None:
    """Raises WeightVersionError for weights that cannot follow `first`, with which the engine started."""
    manifest = weights.manifest
    where = f"version {manifest.version}"
    if manifest.format not in QUANTIZATION_CONFIGS:
        known = ", ".join(QUANTIZATION_CONFIGS)
        raise WeightVersionError(f"{where}: format {manifest.format!r} is none of {known}")
    if first is None:
        return
    if (manifest.model, manifest.format) != (first.model, first.format):
        raise WeightVersionError(f"{where} is of another model or format")
    # Half of a fused layer (q without k and v) would be loaded without a word.
    if lacking := _shapes(first) - _shapes(manifest):
        raise WeightVersionError(f"{where} lacks {min(lacking)[0]}, or has it in another shape")


def write_version(weights: WeightVersion, directory: Path) -> None:
    """A checkpoint of `weights` in `directory`, which exists. Raises WeightVersionError."""
    manifest = weights.manifest
    try:
        write_checkpoint(weights.tensors, manifest.format, manifest.model, directory)
    except (CheckpointError, KeyError) as error:
        raise WeightVersionError(f"version {manifest.version}: {error}") from error


def check_quantized(engine: str, linears: dict[str, str], format: str) -> None:
    """Raises EngineDied where a linear is not computed as the format says: some quantized settings start
    without complaint and stay in full precision. `linears`: by name, the class that computes it."""
    wrong = [name for name, how in linears.items() if (how in UNQUANTIZED) != (format == "bf16")]
    if wrong or not linears:
        how = linears[wrong[0]] if wrong else "nothing"
        raise EngineDied(f"format {format}: {engine} runs {wrong[:1]} as {how}")
    logger.info("%s runs %s by %s", engine, format, ", ".join(sorted(set(linears.values()))))


def version_stamp(manifest: Manifest) -> str:
    """Returns the mark that an engine puts on the tokens of a version."""
    return f"{manifest.version}:{manifest.digest}"


def fresh_salt() -> str:
    """Returns a salt for the prefix cache that holds while one loading of weights lasts. It is never the
    version itself: a request that waited while newer weights came may have left its keys and values under the
    old salt, and a version comes twice where a learner begins again at a checkpoint."""
    return uuid.uuid4().hex


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def is_hopper() -> bool:
    import torch

    return has_gpu() and torch.cuda.get_device_capability() == (9, 0)


def _shapes(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors}
