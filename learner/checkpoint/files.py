"""Checkpoints: weights, optimizer, RNG, and the place in the stream of groups. No pickle: safetensors and JSON.

    checkpoints/step-000050/state.json           everything that is not a tensor
                            tensors.safetensors  model.*, optimizer.*, rng; critic.*, critic_optimizer.*,
                                                 reference.*, kv_scales.*, sticky.* (areal_q/quant/
                                                 sticky.py) where there are such
                            tensors-00001.safetensors, …   with `checkpoint.sharded`: shares of *optimizer.*,
                                                 whole tensors each, written by the ranks of that number

Written beside and renamed, so that a directory of the final name is whole. A crash in the middle leaves a
hidden one, which the next save or restore sees to. The state carries a hash of everything.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from areal_q.errors import CheckpointError
from areal_q.models.low_bit.quantized_forward import materialise
from areal_q.system.files import (
    SCRATCH,
    by_number,
    clear_leftovers,
    move_into_place,
    save_tensors,
    sync,
)
from learner.backends.single_device import TorchPolicy

logger = logging.getLogger(__name__)
START = "step-000000"
"""Never removed: a replay can begin there"""
KV, STICKY = "kv_scales.", "sticky."
STATE, TENSORS, SHARE = "state.json", "tensors.safetensors", "tensors-{:05d}.safetensors"
STAGED = ".shares-"
"""Begins the name of a directory in which other ranks leave their shares of a checkpoint"""


Tensors = dict[str, torch.Tensor]


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint holds besides tensors. Example: step 50 stands before learner step 50."""

    schema: int = 1
    run_id: str = ""
    """Of the run (areal_q/system/run_dir.py); empty in checkpoints of before there were ids"""
    step: int
    """The next learner step; equal to the version of the weights"""
    position: str
    """The last entry of the groups stream up to which all groups are finished"""
    cursor: int
    """Number of the next ticket"""
    outstanding: list[int]
    """Tickets admitted and not finished: issued again should Redis be lost"""
    uses: dict[int, int] = {}
    """Of these, steps that groups were used in which may be used again (buffer/sampling/replay_pool.py)"""
    lost: list[int] = []
    """Tickets that came to nothing: should one be re-admitted, it counts"""
    digests: dict[int, str]
    """Of this history's newest versions (learner/data/staleness.py)"""
    forks: list[int] = []
    """Where it lately forked off abandoned ones"""
    updates: int
    skipped: int
    model: dict[str, Any] = {}
    """Hugging Face `config.json`; empty in checkpoints of before it was recorded"""
    digest: str = ""
    """xxh3-128 of tensors.safetensors, of shares in their order and of state.json with an empty digest,
    hexadecimal"""


def save(directory: Path, state: State, policy: TorchPolicy, keep: int) -> Path:
    """`write` with what `policy` holds now."""
    return write(directory, state, tensors_of(policy), keep)


def stage(directory: Path, step: int) -> Path:
    """An empty directory for the shares of other ranks, the same for all who ask for it at `step`."""
    _clear_shares(directory)
    staged = directory / f"{STAGED}step-{step:06d}"
    staged.mkdir(parents=True)
    return staged


def write_share(staged: Path, rank: int, tensors: Tensors) -> None:
    """What rank `rank` has of a checkpoint. A file of the final name is whole. Raises CheckpointError."""
    file = staged / SHARE.format(rank)
    scratch = file.with_name(f"{SCRATCH}{file.name}")
    with _writing(file):
        save_tensors(tensors, scratch)
        sync(scratch)
        scratch.rename(file)  # the first rank may take it at once, and remove the directory


def write(
    directory: Path, state: State, tensors: Tensors, keep: int, shares: Sequence[Path] = ()
) -> Path:
    """Writes `directory/step-NNNNNN` and removes all but the start's and the newest `keep`. Returns its
    path. Waits for the files `shares`, which other ranks are writing, and takes them along. Raises
    CheckpointError for a full disk, say; those before are as they were."""
    final = directory / f"step-{state.step:06d}"
    with _writing(final):
        _write(directory, final, state, tensors, keep, shares)
    return final


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from error


def _write(
    directory: Path, final: Path, state: State, tensors: Tensors, keep: int, shares: Sequence[Path]
) -> None:
    clear_leftovers(directory)
    part = directory / f"{SCRATCH}{final.name}"
    part.mkdir(parents=True)
    save_tensors(tensors, part / TENSORS)
    for share in shares:
        while not share.exists():  # should its rank die, torchrun ends this process, too
            time.sleep(0.02)
        share.rename(part / share.name)
        if share is shares[-1]:
            share.parent.rmdir()
    digest = _digest(part, msgspec.json.encode(state))
    state = msgspec.structs.replace(state, digest=digest)
    (part / STATE).write_bytes(msgspec.json.encode(state))
    move_into_place(part, final)
    for old in steps(directory)[:-keep]:
        if old.name != START:
            old.rename(directory / f"{SCRATCH}{old.name}")
    clear_leftovers(directory)


def _clear_shares(directory: Path) -> None:
    """Of a checkpoint that came to nothing."""
    for left in directory.glob(f"{STAGED}*"):
        shutil.rmtree(left)


def steps(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return by_number(directory.glob("step-*"))


def restore(directory: Path, policy: TorchPolicy) -> State:
    """Loads the newest checkpoint into `policy`. Raises CheckpointError naming what is damaged and,
    where there is one, the checkpoint before it."""
    clear_leftovers(directory)
    _clear_shares(directory)
    found = steps(directory)
    if not found:
        raise CheckpointError(f"{directory}: no checkpoint to resume from")
    try:
        state = read_state(found[-1])
        load(found[-1], state, policy)
    except CheckpointError as error:
        before = f"; remove it to resume from {found[-2].name}" if len(found) > 1 else ""
        raise CheckpointError(f"{error}{before}") from error
    return state


def read_state(path: Path) -> State:
    """Raises CheckpointError naming the checkpoint."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def load(path: Path, state: State, policy: TorchPolicy) -> None:
    """Puts checkpoint `path`, whose state is `state`, into `policy`. Raises CheckpointError naming what
    is damaged or does not fit."""
    try:
        _load(policy, read_tensors(path, state))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    policy.updates, policy.skipped = state.updates, state.skipped


def read_tensors(path: Path, state: State) -> dict[str, torch.Tensor]:
    """Raises CheckpointError unless they and the state hash to what the state says."""
    try:
        # Of the bytes that were written, not of `state` encoded again: the schema may have grown since.
        written = (path / STATE).read_bytes()
        blank = written.replace(f'"digest":"{state.digest}"'.encode(), b'"digest":""')
        if _digest(path, blank) != state.digest:
            raise CheckpointError(f"{path}: {TENSORS} and {STATE} do not match their hash")
        return {name: t for file in _files(path) for name, t in load_file(file).items()}
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error


def tensors_of(policy: TorchPolicy, collected: Tensors | None = None) -> Tensors:
    """Returns every tensor of `policy` that a checkpoint holds, on the CPU.

    `collected` is what PolicyUpdater.collect returned: this rank's share, where other ranks write theirs.
    """
    tensors: Tensors = {"rng": torch.get_rng_state(), **(collected or {})}
    for part, module in _modules(policy).items():
        tensors |= {f"{part}.{k}": v for k, v in module.state_dict().items()}
    for part, optimizer in _optimizers(policy).items():
        for i, slot in optimizer.state_dict()["state"].items():
            tensors |= {f"{part}.{i}.{k}": v for k, v in slot.items()}
    tensors |= {f"{KV}{k}": v for k, v in policy.kv_scales.items()}
    if policy.sticky:
        tensors |= {f"{STICKY}{k}": v for k, v in policy.sticky.tensors().items()}
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _modules(policy: TorchPolicy) -> dict[str, nn.Module]:
    """By how the names of their tensors begin."""
    found = {"model": policy.model, "critic": policy.critic, "reference": policy.reference}
    return {part: module for part, module in found.items() if module is not None}


def _optimizers(policy: TorchPolicy) -> dict[str, torch.optim.Optimizer]:
    critic = {"critic_optimizer": policy.critic.optimizer} if policy.critic else {}
    return {"optimizer": policy.optimizer, **critic}


def _load(policy: TorchPolicy, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for part, module in _modules(policy).items():
            for name, parameter in module.state_dict().items():
                parameter.copy_(tensors[f"{part}.{name}"])
            materialise(module)
    for part, optimizer in _optimizers(policy).items():
        slots: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"{part}."):
                _, index, key = name.split(".")
                slots.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": slots, "param_groups": groups})
    policy.kv_scales = _named(tensors, KV, policy.cfg.device)
    if policy.sticky:
        policy.sticky.restore(_named(tensors, STICKY, policy.cfg.device))
    torch.set_rng_state(tensors["rng"])


def _named(tensors: Tensors, prefix: str, device: str) -> Tensors:
    """Those whose names begin so, without it."""
    return {
        k.removeprefix(prefix): v.to(device) for k, v in tensors.items() if k.startswith(prefix)
    }


def _digest(path: Path, state: bytes) -> str:
    digest = xxhash.xxh3_128()
    for file in _files(path):
        digest.update(file.read_bytes())
    digest.update(state)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    """Of the tensors: rank 0's, then the shares."""
    return [path / TENSORS, *by_number(path.glob(SHARE.replace("{:05d}", "*")))]
