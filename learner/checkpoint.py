"""Checkpoints: weights, optimizer, RNG, and the place in the stream of groups. No pickle: safetensors and JSON.

    checkpoints/step-000050/state.json           everything that is not a tensor
                            tensors.safetensors  model.*, optimizer.*, rng

Written beside and renamed, so that a directory of the final name is whole; a crash in the middle leaves a
temporary one, which the next save removes. The state carries the hash of the tensors' file.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec
import torch
import xxhash
from safetensors.torch import load_file, save_file

from areal_q.errors import CheckpointError
from learner.trainer import Trainer

logger = logging.getLogger(__name__)


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds besides tensors. Example: step 50 stands before learner step 50."""

    schema: int = 1
    step: int
    """The next learner step; equal to the version of the weights"""
    position: str
    """The last entry of the groups stream that was consumed"""
    cursor: int
    """Number of the next ticket"""
    outstanding: list[int]
    """Tickets admitted and not consumed: issued again should Redis be lost"""
    digests: dict[int, str]
    """Of this history's newest versions (learner/lineage.py)"""
    updates: int
    skipped: int
    tensors_digest: str = ""


def save(directory: Path, state: State, trainer: Trainer, keep: int) -> Path:
    """Writes `directory/step-NNNNNN` and removes all but the newest `keep`. Returns its path."""
    final = directory / f"step-{state.step:06d}"
    for stale in directory.glob(".tmp-*"):
        shutil.rmtree(stale)
    part = directory / f".tmp-{final.name}"
    part.mkdir(parents=True)
    save_file(_tensors(trainer), part / "tensors.safetensors")
    state = msgspec.structs.replace(state, tensors_digest=_digest(part / "tensors.safetensors"))
    (part / "state.json").write_bytes(msgspec.json.encode(state))
    for file in (*part.iterdir(), part):
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    part.rename(final)
    _sync(directory)
    for old in steps(directory)[:-keep]:
        shutil.rmtree(old)
    return final


def steps(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(directory.glob("step-*"))


def restore(directory: Path, trainer: Trainer) -> State:
    """Loads the newest checkpoint into `trainer`. Raises CheckpointError naming what is damaged and,
    where there is one, the checkpoint before it."""
    found = steps(directory)
    if not found:
        raise CheckpointError(f"{directory}: no checkpoint to resume from")
    path = found[-1]
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=State)
        if _digest(path / "tensors.safetensors") != state.tensors_digest:
            raise CheckpointError("tensors.safetensors does not match the hash in state.json")
        _load(trainer, load_file(path / "tensors.safetensors"))
    except (OSError, msgspec.DecodeError, CheckpointError, KeyError, RuntimeError) as error:
        before = f"; remove it to resume from {found[-2].name}" if len(found) > 1 else ""
        raise CheckpointError(f"{path}: {error}{before}") from error
    trainer.updates, trainer.skipped = state.updates, state.skipped
    return state


def _tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    tensors |= {f"model.{k}": v for k, v in trainer.model.named_parameters()}
    for i, slot in trainer.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{k}": v for k, v in slot.items()}
    tensors["rng"] = torch.get_rng_state()
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _load(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            slots.setdefault(int(index), {})[key] = tensor
    groups = trainer.optimizer.state_dict()["param_groups"]
    trainer.optimizer.load_state_dict({"state": slots, "param_groups": groups})
    torch.set_rng_state(tensors["rng"])


def _digest(path: Path) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
