"""What a run will write to its disk, by its settings and its model's files, beside what is free there."""

import json
import math
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from areal_q.config import AdamW, AdamW8bit, Run, SmallModel
from areal_q.errors import CheckpointError, ConfigError
from areal_q.models.hf.weight_files import weight_files
from areal_q.quant.linears import is_quantized
from areal_q.system.disk import size
from areal_q.system.run_dir import checkpoints_of, path_of

_UNREADABLE = (
    *(CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError),
    *(RecursionError, struct.error),
)
"""What a file raises that is no safetensors, or a header that is none"""
_TOKEN_BYTES = 24
"""Most bytes of a response's token in trajectories/, tokens/ and redis/ together: its id and log-probs"""
_EIGHT_BITS = ("int8", "int8-weight", "fp8", "fp8-channel", "fp8-weight")
_FORMAT_BYTES = {
    "bf16": 2.0,
    **dict.fromkeys(_EIGHT_BITS, 1.0),
    **dict.fromkeys(("int4", "int4-fp8", "mxfp4"), 0.53),
    **dict.fromkeys(("int4-g32", "nvfp4", "nf4"), 0.57),
}
"""Bytes of a weight, with its share of the scales"""


@dataclass(frozen=True)
class DiskUse:
    """What a run writes, in bytes; and what is free where it is written."""

    checkpoints: float
    at_once: int
    """Most checkpoints that exist at the same time: one is complete before the oldest is removed."""
    one: float
    """A checkpoint that is not the start's."""
    model: float
    """The directory hf/, in the model's own dtype."""
    logs: float
    """Most bytes of the logged groups and of Redis."""
    free: int
    where: Path

    @property
    def fits(self) -> bool:
        return self.checkpoints + self.model + self.logs < self.free

    def __str__(self) -> str:
        total = size(self.checkpoints + self.model + self.logs)
        return (
            f"the run writes up to {total}: {self.at_once} checkpoints of {size(self.checkpoints)} together, "
            f"the model of {size(self.model)}, logs of {size(self.logs)}; {size(self.free)} are free at "
            f"{self.where}"
        )


def disk_use(run: Run) -> DiskUse:
    """Returns what `run` writes from its start to its end. The directory of a run need not exist yet."""
    directory = path_of(run).absolute()
    where = next(path for path in (directory, *directory.parents) if path.exists())
    found = _counted(run)
    kept, cfg = run.checkpoint, run.learner
    written = math.ceil(run.steps / kept.every)
    later = min(kept.keep + 1, written) + (run.steps // kept.keep_every if kept.keep_every else 0)
    weights, model = found.weights, found.nbytes
    if cfg.lora:  # the base is packed; with its float32 it is written once, as are the adapters
        packed = found.linears * format_bytes(run.rollout.format)
        modules = packed + 4 * (weights - found.linears) + 4 * found.adapters
        moments = found.adapters * moment_bytes(run)
        model += 4 * weights + 4 * found.adapters
    else:
        modules = 4 * weights * (2 if cfg.reference_kl else 1)
        moments = weights * moment_bytes(run)
    separate = cfg.critic is not None and cfg.critic.trunk == "separate"
    critic = weights * (4 + 8) if separate else 0
    sampled = run.steps * cfg.groups * cfg.group_size * run.rollout.sampling.max_tokens
    one = modules + moments + critic
    return DiskUse(
        checkpoints=later * one + (modules if kept.start else 0),
        at_once=later + kept.start,
        one=one,
        model=model,
        logs=sampled * _TOKEN_BYTES,
        free=shutil.disk_usage(where).free,
        where=where,
    )


def check_room(run: Run, directory: Path) -> None:
    """Raises ConfigError if there is no room for the checkpoints that `run` has yet to write to `directory`.

    Those of `checkpoint.keep_every` do not count, since a run that is long enough fills any disk with them."""
    use, kept = disk_use(run), run.checkpoint
    kept_for_good = run.steps // kept.keep_every if kept.keep_every else 0
    need = use.checkpoints - kept_for_good * use.one
    lacking = max(use.one, need - _bytes(directory / "checkpoints"))
    if lacking > use.free:
        raise ConfigError(
            f"{directory}: {use.at_once - kept_for_good} checkpoints of the model need {size(need)}, "
            f"{size(lacking)} more than are there, and {size(use.free)} are free: a larger disk, or a smaller "
            f"checkpoint.keep"
        )


def still_to_write(run: Run, directory: Path) -> float:
    """Returns how many bytes `run` will add to `directory`: the checkpoints that are not there, or at least the
    next one, which is written before the oldest goes; the model; logs, at the pace of the steps so far."""
    use = disk_use(run)
    done = max(checkpoints_of(directory), default=0)
    logs = sum(_bytes(directory / name) for name in ("trajectories", "steps", "tokens"))
    later = logs * (run.steps - done) / done if done else 0.0
    model = 0 if (directory / "hf").exists() else use.model
    if done >= run.steps:
        return model
    return max(use.one, use.checkpoints - _bytes(directory / "checkpoints")) + model + later


def _bytes(directory: Path) -> int:
    """Returns the bytes of all files below `directory`; one that goes meanwhile has none."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def format_bytes(format: str) -> float:
    """Returns about how many bytes a weight takes in this number format, scales included."""
    return _FORMAT_BYTES[format]


def moment_bytes(run: Run) -> int:
    """Returns the bytes of the optimizer's moments for a weight."""
    match run.learner.optimizer:
        case AdamW():
            return 8
        case AdamW8bit():
            return 2
        case _:  # Muon has one moment of the linears that formats apply to
            return 4


@dataclass
class _Counted:
    """What a model's files hold."""

    weights: int = 0
    linears: int = 0
    """How many of them a number format applies to"""
    adapters: int = 0
    """Weights of the adapters that a run with them trains"""
    nbytes: int = 0


def _counted(run: Run) -> _Counted:
    """Returns what the model holds. Files that cannot be read hold nothing, which loading them reports."""
    model, lora = run.model, run.learner.lora
    if isinstance(model, SmallModel):
        width, given = model.width, model.width * model.kv_heads // model.heads
        mlps = [(width, model.mlp)] * 3 * max(1, model.experts)
        layer = [(width, width)] * 2 + [(width, given)] * 2 + mlps
        weights = model.layers * sum(rows * columns for rows, columns in layer)
        sides = model.layers * sum(rows + columns for rows, columns in layer)
        return _Counted(weights, weights, lora.rank * sides if lora else 0, 4 * weights)
    found = _Counted()
    try:
        for file in weight_files(Path(model.path)):
            found.nbytes += file.stat().st_size
            for name, shape in _shapes(file).items():
                found.weights += math.prod(shape)
                if is_quantized(name):
                    found.linears += math.prod(shape)
                    # Experts may be stacked.
                    sides = math.prod(shape[:-2]) * sum(shape[-2:])
                    found.adapters += lora.rank * sides if lora else 0
    except _UNREADABLE:
        return _Counted()
    return found


def _shapes(file: Path) -> dict[str, list[int]]:
    """Returns the shapes of all tensors in a safetensors file, by its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(min(length, 100 << 20)))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
