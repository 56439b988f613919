"""What backends share that serve a checkpoint of the first version: vLLM and SGLang."""

import logging
import uuid
from pathlib import Path

import numpy as np

from areal_q.errors import CheckpointError, EngineDied, RecordError, WeightVersionError
from areal_q.messages import Manifest
from areal_q.models import DecoderConfig
from areal_q.models.hf.quantized import QUANTIZATION_CONFIGS, write_checkpoint
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Request

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


def check_request(request: Request, model: DecoderConfig, max_positions: int) -> None:
    """Raises RecordError for a request that `model` can never serve. 0 positions: the model's own."""
    prompt, sampling = np.asarray(request.prompt_ids), request.sampling
    most = max_positions or model.max_positions
    if len(prompt) + sampling.max_tokens > most:
        raise RecordError(
            f"a prompt of {len(prompt)} tokens and max_tokens = {sampling.max_tokens} "
            f"exceed max_positions = {most}"
        )
    if prompt.min() < 0 or prompt.max() >= model.vocab_size:
        raise RecordError(f"a prompt token is outside the vocabulary of {model.vocab_size}")


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
    """What an engine writes on the tokens of a version."""
    return f"{manifest.version}:{manifest.digest}"


def fresh_salt() -> str:
    """For the prefix cache while one loading of weights lasts. Never the version itself: requests that waited
    while newer weights came may have left those's keys and values under the old salt, and a version comes
    twice where a learner begins again at a checkpoint."""
    return uuid.uuid4().hex


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def is_hopper() -> bool:
    import torch

    return has_gpu() and torch.cuda.get_device_capability() == (9, 0)


def _shapes(manifest: Manifest) -> set[tuple[str, str, tuple[int, ...]]]:
    return {(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors}
