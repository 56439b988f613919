"""The learner over several processes: `torchrun --nproc-per-node N -m learner …`.

    rank 0   Learner ─▶ Leader.step ──samples──▶ every rank: Shard.step on its share of the groups
             whole weights ◀──gathered, tensor by tensor──┘       (collectives of FSDP2, or of Megatron)

| wait              | for                         | unblocked by                                       |
|-------------------|-----------------------------|----------------------------------------------------|
| follow            | rank 0's next word          | Leader's step, collect, reset_reference, close     |
| every collective  | all other ranks             | their being alive: torchrun ends all when one dies |

Rank 0 holds a whole copy of the weights on the host besides its shard, and of the moments when a checkpoint is
taken: what it publishes, saves and exports is what one process would, so that a run goes on with any number
of ranks, and with either backend. Others need nothing but rank 0 and the settings: neither the model's files,
nor Redis, nor the run's directory.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from areal_q.config import AdamW, MegatronBackend, Run, TorchBackend
from areal_q.errors import ConfigError, UserError
from areal_q.messages import Array, Trajectory
from learner.advantages import needs_policy
from learner.backend import Shard
from learner.batch import Sample
from learner.checkpoint import write_share
from learner.kv_scales import kv_scales
from learner.ranks import Ranks
from learner.trainer import Trainer


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A sample on its way to another rank."""

    group: int
    prompt_ids: Array
    trajectory: Trajectory
    advantage: float
    lag: Array
    weight: float

    @classmethod
    def of(cls, s: Sample) -> "Piece":
        prompt, lag = Array.of(s.prompt_ids, "int32"), Array.of(s.lag, "int64")
        return cls(s.group, prompt, s.trajectory, s.advantage, lag, s.weight)

    def sample(self) -> Sample:
        prompt, lag = self.prompt_ids.numpy(), self.lag.numpy()
        return Sample(self.group, prompt, self.trajectory, self.advantage, lag, self.weight)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """What a rank has to know of the whole, before its tensors come."""

    model: dict
    """Hugging Face `config.json`"""
    temperature: float
    updates: int
    skipped: int
    moments: bool
    """Whether the optimizers have any"""


class Step(msgspec.Struct, frozen=True, tag="step"):
    pieces: list[Piece]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """What a checkpoint holds besides the weights is wanted on rank 0; or, but for rank 0's share, in this
    directory."""

    staged: str = ""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """The present policy becomes the reference."""


class End(msgspec.Struct, frozen=True, tag="end"):
    pass


Word = Begin | Step | Collect | Reset | End
_decoder = msgspec.msgpack.Decoder(Word)


def _fsdp(begin: Begin, run: Run, ranks: Ranks, whole: Trainer | None) -> Shard:
    from learner.fsdp import fsdp_shard

    return fsdp_shard(begin, run, ranks, whole)


def _megatron(begin: Begin, run: Run, ranks: Ranks, whole: Trainer | None) -> Shard:
    from learner.mcore.policy import megatron_shard

    return megatron_shard(begin, run, ranks, whole)


BACKENDS: dict[type, Callable[[Begin, Run, Ranks, Trainer | None], Shard]] = {
    TorchBackend: _fsdp,
    MegatronBackend: _megatron,
}


def join(run: Run) -> Ranks:
    """This process among those that torchrun started. Raises ConfigError for settings that cannot go with
    so many, or with the backend."""
    size, device = int(os.environ.get("WORLD_SIZE", "1")), run.learner.device
    for name, asked in _refused(run, size).items():
        if asked:
            kind = run.learner.backend.__struct_config__.tag
            raise ConfigError(f"{name}: not with {size} processes of backend {kind} on {device}")
    if isinstance(run.learner.backend, MegatronBackend):
        from learner.mcore import require

        require(run.learner.backend, size)
    # Rank 0 may wait for rollouts as long as it takes; that all are alive is torchrun's business.
    backend, timeout = (
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        timedelta(days=7),
    )
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return Ranks(dist.get_rank(), size)


def _refused(run: Run, size: int) -> dict[str, bool]:
    """Settings that were asked for in vain, by name."""
    cfg, backend = run.learner, run.learner.backend
    sharing = size
    if isinstance(backend, MegatronBackend):
        sharing = size // (backend.tensor * backend.pipeline)
    # Every rank's advantages come from what it computed itself.
    too_few = needs_policy(cfg) and cfg.groups // cfg.minibatches < sharing
    found = {
        "learner.groups / learner.minibatches": too_few,
        # The forward's own numbers are those of the format.
        "learner.dtype": cfg.dtype != "float32"
        and (cfg.precision != "full" or cfg.lora is not None),
    }
    if isinstance(backend, TorchBackend):
        found["learner.backend.offload"] = backend.offload and not cfg.device.startswith("cuda")
    else:
        found["learner.optimizer.type"] = not isinstance(cfg.optimizer, AdamW)
    return found


def say(ranks: Ranks, word: Word) -> None:
    ranks.broadcast(msgspec.msgpack.encode(word))


def dismiss(ranks: Ranks) -> None:
    """Others end, as this process is about to."""
    if dist.is_initialized():
        say(ranks, End())
        dist.destroy_process_group()


def leave() -> NoReturn:
    """Ends this process well, but without the interpreter's own end: a thread of a collective that lets go of
    its last tensor in the middle of that aborts the process, and torchrun would call the run failed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def hear(ranks: Ranks) -> Word:
    """Raises UserError where rank 0 ended without a word: what it said before is what a user has to know."""
    try:
        data = ranks.broadcast(b"")
    except RuntimeError as error:
        raise UserError(f"rank {ranks.rank}: rank 0 is gone: {error}".splitlines()[0]) from error
    return _decoder.decode(data)


class Leader(Trainer):
    """Rank 0's: `whole`, but that steps are taken by all ranks together. `close` lets them go."""

    def __init__(self, whole: Trainer, run: Run, ranks: Ranks) -> None:
        vars(self).update(vars(whole))
        self._ranks = ranks
        self._broken = True
        """Whether other ranks may be in the middle of something"""
        begin = Begin(
            whole.model.config.to_hf(),
            whole.temperature,
            whole.updates,
            whole.skipped,
            moments=bool(self.optimizer.state),
        )
        say(ranks, begin)
        self._shard = BACKENDS[type(run.learner.backend)](begin, run, ranks, self)
        self._broken = False
        if run.checkpoint.sharded:
            self.shares = ranks.size - 1  # type: ignore[misc]
            # Theirs from now on.
            self.optimizer.state.clear()
            if self.critic is not None:
                self.critic.optimizer.state.clear()

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self._broken = True
        say(self._ranks, Step([Piece.of(sample) for sample in samples]))
        values = self._shard.step(samples)
        self.before_write()
        self._shard.gather_weights(self)
        self._broken = False
        if self.calibrate:
            self.kv_scales = kv_scales(self.model, samples, self.calibrate, self.cfg.device)
        self.updates, self.skipped = self._shard.updates, self._shard.skipped
        return values

    def collect(self, staged: Path | None = None) -> dict[str, Tensor]:
        say(self._ranks, Collect(str(staged or "")))
        if staged:
            return self._shard.share_of_rest(self)
        self._shard.gather_rest(self)
        return {}

    def reset_reference(self) -> None:
        say(self._ranks, Reset())
        self._shard.reset_reference()
        super().reset_reference()

    def close(self) -> None:
        """After a failure nothing is said: this process ends with an error, and torchrun ends the others."""
        if not self._broken:
            self._shard.close()
            dismiss(self._ranks)


def follow(run: Run, ranks: Ranks) -> None:
    """What the other ranks do until rank 0 ends."""
    begin = hear(ranks)
    if not isinstance(begin, Begin):
        dist.destroy_process_group()
        return
    shard = BACKENDS[type(run.learner.backend)](begin, run, ranks, None)
    while True:
        match hear(ranks):
            case Step(pieces):
                shard.step([piece.sample() for piece in pieces])
                shard.gather_weights(None)
            case Collect(""):
                shard.gather_rest(None)
            case Collect(staged):
                write_share(Path(staged), ranks.rank, shard.share_of_rest(None))
            case Reset():
                shard.reset_reference()
            case _:
                shard.close()
                dist.destroy_process_group()
                return
