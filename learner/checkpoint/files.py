"""Checkpoint files: weights, optimizer, RNG and the position in the stream of groups, in safetensors and JSON.

    checkpoints/step-000050/state.json           everything that is not a tensor
                            tensors.safetensors  model.*, optimizer.*, rng; critic.*, critic_optimizer.*,
                                                 reference.*, kv_scales.*, sticky.*, smoothing.*
                                                 where there are such
                            tensors-00001.safetensors, …   with `checkpoint.sharded`: shares of *optimizer.*,
                                                 of whole tensors, each written by the rank of that number

A checkpoint is written under a hidden name and renamed, so that a directory of the final name is whole. A crash
in between leaves a hidden directory, which the next save or restore removes. The state contains a hash of
everything.
"""

import shutil
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file

from areal_q.decode_errors import in_words
from areal_q.errors import CheckpointError
from areal_q.system.files import (
    SCRATCH,
    by_number,
    clear_leftovers,
    move_into_place,
    save_tensors,
    sync,
)
from areal_q.tasks.ordering.pass_rates import PoolsState

START = "step-000000"
"""The checkpoint of the start, which is never removed, so that a replay can begin there."""
STATE, TENSORS, SHARE = "state.json", "tensors.safetensors", "tensors-{:05d}.safetensors"
_STAGED = ".shares-"
"""Prefix of the directory into which other ranks write their shares of a checkpoint."""
_PIECE_BYTES = 1 << 20
"""Bytes of a file that are hashed at once"""


Tensors = dict[str, torch.Tensor]


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a checkpoint that is not tensors. Example: the state of step 50 is that before learner step 50."""

    schema: int = 1
    run_id: str = ""
    """Id of the run (areal_q/system/run_dir.py); empty in checkpoints from before there were ids."""
    step: int
    """The next learner step; equal to the version of the weights."""
    position: str
    """The last entry of the groups stream up to which all groups are finished."""
    cursor: int
    """Number of the next ticket."""
    outstanding: list[int]
    """Tickets that were admitted and are not finished; they are admitted again if Redis lost its data."""
    uses: dict[int, int] = {}
    """Number of steps that learnt from a group which may be used again, by ticket
    (buffer/sampling/replay_pool.py)."""
    order: dict[str, PoolsState] = {}
    """The state of an order of problems that remembers, by the name of the task
    (areal_q/tasks/ordering/pass_rates.py)."""
    lost: list[int] = []
    """Tickets that were lost and replaced; if one is admitted again, its group counts."""
    digests: dict[int, str]
    """Digests of this history's newest versions (learner/data/staleness.py)."""
    totals: dict[str, float] = {}
    """Counters of the run so far, by the metric's name; empty in checkpoints from before they were kept."""
    forks: list[int] = []
    """Versions at which this history recently forked off abandoned ones."""
    updates: int
    """Number of optimizer steps tried."""
    skipped: int
    """Number of these that were skipped because a gradient was not finite."""
    model: dict[str, Any] = {}
    """Hugging Face `config.json`; empty in checkpoints from before it was recorded."""
    digest: str = ""
    """xxh3-128 of tensors.safetensors, of shares in their order and of state.json with an empty digest,
    hexadecimal"""


def stage(directory: Path, step: int) -> Path:
    """Creates an empty directory for other ranks' shares of the checkpoint of `step`, and returns its path."""
    clear_shares(directory)
    staged = directory / f"{_STAGED}step-{step:06d}"
    staged.mkdir(parents=True)
    return staged


def write_share(staged: Path, rank: int, tensors: Tensors) -> None:
    """Writes rank `rank`'s share of a checkpoint, under its final name once it is whole. Raises CheckpointError
    if it cannot be written."""
    file = staged / SHARE.format(rank)
    scratch = file.with_name(f"{SCRATCH}{file.name}")
    with _writing(file):
        save_tensors(tensors, scratch)
        sync(scratch)
        scratch.rename(file)  # rank 0 may move the file at once, and remove the directory


def write(
    directory: Path,
    state: State,
    tensors: Tensors,
    keep: int,
    keep_every: int = 0,
    shares: Sequence[Path] = (),
    on_read: Callable[[], None] = lambda: None,
    spared: Container[int] = (),
) -> Path:
    """Writes the checkpoint `directory/step-NNNNNN`, to which it moves the files `shares` after waiting for
    other ranks to write them, and returns its path. Then removes all checkpoints but the one of the start, the
    newest `keep`, and those whose step is in `spared` or a multiple of `keep_every`. `on_read` is called once
    `tensors` may change. Raises CheckpointError if it cannot be written, such as to a full disk; earlier
    checkpoints are unchanged then."""
    final = directory / f"step-{state.step:06d}"
    with _writing(final):
        _write(directory, final, state, tensors, shares, on_read)
        for old in steps(directory)[:-keep]:
            name = old.name.removeprefix("step-")
            number = int(name) if name.isdigit() else -1
            stays = number in spared or (keep_every > 0 and number >= 0 == number % keep_every)
            if old.name != START and not stays:
                old.rename(directory / f"{SCRATCH}{old.name}")
        clear_leftovers(directory)
    return final


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: cannot be written: {error}") from error


def _write(
    directory: Path,
    final: Path,
    state: State,
    tensors: Tensors,
    shares: Sequence[Path],
    on_read: Callable[[], None],
) -> None:
    clear_leftovers(directory)
    part = directory / f"{SCRATCH}{final.name}"
    part.mkdir(parents=True)
    save_tensors(tensors, part / TENSORS)
    on_read()
    for share in shares:
        while not share.exists():  # if its rank dies, torchrun ends this process, too
            time.sleep(0.02)
        share.rename(part / share.name)
        if share is shares[-1]:
            share.parent.rmdir()
    digest = _digest(part, msgspec.json.encode(state))
    state = msgspec.structs.replace(state, digest=digest)
    (part / STATE).write_bytes(msgspec.json.encode(state))
    move_into_place(part, final)


def clear_shares(directory: Path) -> None:
    """Removes the shares of checkpoints that were not completed."""
    for left in directory.glob(f"{_STAGED}*"):
        shutil.rmtree(left)


def steps(directory: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    return by_number(directory.glob("step-*"))


def read_state(path: Path) -> State:
    """Returns the state of checkpoint `path`. Raises CheckpointError naming it."""
    try:
        return msgspec.json.decode((path / STATE).read_bytes(), type=State)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}: {STATE}: {in_words(error)}") from error


def read_tensors(path: Path, state: State) -> dict[str, torch.Tensor]:
    """Returns the tensors of checkpoint `path`. Raises CheckpointError unless they and the state hash to the
    digest in the state."""
    try:
        # The hash is of the bytes as written: with a newer schema `state` would be encoded differently.
        written = (path / STATE).read_bytes()
        blank = written.replace(f'"digest":"{state.digest}"'.encode(), b'"digest":""')
        if _digest(path, blank) != state.digest:
            raise CheckpointError(f"{path}: {TENSORS} and {STATE} do not match their hash")
        return {name: t for file in _files(path) for name, t in load_file(file).items()}
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _digest(path: Path, state: bytes) -> str:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    for file in _files(path):
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(piece):
                digest.update(piece[:count])
    digest.update(state)
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    """Returns the files with tensors: rank 0's, then the shares in the order of their ranks."""
    return [path / TENSORS, *by_number(path.glob(SHARE.replace("{:05d}", "*")))]
