"""The learner over several processes with torch's FSDP2: `torchrun --nproc-per-node N -m learner …`.

    rank 0   Learner ─▶ Leader.step ──samples──▶ every rank: Trainer.step on its share of the groups
             whole weights ◀──gathered, tensor by tensor──┘       (all-gather, reduce-scatter: FSDP2)

| wait              | for                         | unblocked by                                     |
|-------------------|-----------------------------|--------------------------------------------------|
| follow            | rank 0's next word          | Leader.step, Leader.collect, Leader.close        |
| every collective  | all other ranks             | their being alive: torchrun ends all when one dies |

Rank 0 holds a whole copy of the weights on the host besides its shard, and of the moments when a checkpoint is
taken: what it publishes, saves and exports is what one process would, so that a run goes on with any number
of ranks. Others need nothing but rank 0: neither the model's files, nor Redis, nor the run's directory.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_q.config import AdamW, LearnerConfig
from areal_q.errors import ConfigError
from areal_q.messages import Array, Trajectory
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.moe import Router
from learner.batch import Sample
from learner.kv_scales import kv_scales
from learner.ranks import Ranks
from learner.trainer import Trainer

logger = logging.getLogger(__name__)
MOMENTS = ("exp_avg", "exp_avg_sq")


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
    model: dict
    """Hugging Face `config.json`"""
    temperature: float
    updates: int
    skipped: int
    moments: bool
    """Whether the optimizer has any"""


class Step(msgspec.Struct, frozen=True, tag="step"):
    pieces: list[Piece]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """The moments are wanted on rank 0."""


class End(msgspec.Struct, frozen=True, tag="end"):
    pass


Word = Begin | Step | Collect | End
_decoder = msgspec.msgpack.Decoder(Word)


def join(cfg: LearnerConfig) -> Ranks:
    """This process among those that torchrun started. Raises ConfigError for settings that need one process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    refused = {
        "learner.critic": cfg.critic is not None,
        "learner.reference_kl": cfg.reference_kl is not None,
        "learner.precision": cfg.precision != "full",
        "learner.lora": cfg.lora is not None,
        "learner.optimizer.type": not isinstance(cfg.optimizer, AdamW),
        "learner.fsdp.offload": cfg.fsdp.offload and not cfg.device.startswith("cuda"),
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"{name}: not with {size} processes on {cfg.device}")
    # Rank 0 may wait for rollouts as long as it takes; that all are alive is torchrun's business.
    backend = "cpu:gloo,cuda:nccl" if cfg.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(days=7))
    return Ranks(dist.get_rank(), size)


def say(ranks: Ranks, word: Word) -> None:
    ranks.broadcast(msgspec.msgpack.encode(word))


def dismiss(ranks: Ranks) -> None:
    """Others end, as this process is about to."""
    if ranks.size > 1 and dist.is_initialized():
        say(ranks, End())
        dist.destroy_process_group()


def hear(ranks: Ranks) -> Word:
    return _decoder.decode(ranks.broadcast(b""))


class Leader(Trainer):
    """Rank 0's: `whole`, but that steps are taken by all ranks together. `close` lets them go."""

    def __init__(self, whole: Trainer, ranks: Ranks) -> None:
        super().__init__(whole.model, whole.cfg, whole.temperature, whole.updates, whole.skipped)
        self.optimizer = whole.optimizer
        self.calibrate, self.kv_scales = whole.calibrate, whole.kv_scales
        self._ranks = ranks
        self._broken = True
        """Whether other ranks may be in the middle of something"""
        moments = bool(self.optimizer.state)
        begin = Begin(
            whole.model.config.to_hf(), whole.temperature, whole.updates, whole.skipped, moments
        )
        say(ranks, begin)
        self._shard = _sharded(begin, whole.cfg, ranks, self)
        self._broken = False

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        self._broken = True
        say(self._ranks, Step([Piece.of(sample) for sample in samples]))
        values = self._shard.step(samples)
        self.before_write()
        gather_weights(self._shard, self)
        self._broken = False
        if self.calibrate:
            self.kv_scales = kv_scales(self.model, samples, self.calibrate, self.cfg.device)
        self.updates, self.skipped = self._shard.updates, self._shard.skipped
        return values

    def collect(self) -> None:
        say(self._ranks, Collect())
        gather_moments(self._shard, self)

    def close(self) -> None:
        """After a failure nothing is said: this process ends with an error, and torchrun ends the others."""
        if not self._broken:
            dismiss(self._ranks)


def follow(cfg: LearnerConfig, ranks: Ranks) -> None:
    """What the other ranks do until rank 0 ends."""
    begin = hear(ranks)
    if not isinstance(begin, Begin):
        dist.destroy_process_group()
        return
    shard = _sharded(begin, cfg, ranks, None)
    while True:
        match hear(ranks):
            case Step(pieces):
                shard.step([piece.sample() for piece in pieces])
                gather_weights(shard, None)
            case Collect():
                gather_moments(shard, None)
            case _:
                dist.destroy_process_group()
                return


def _sharded(begin: Begin, cfg: LearnerConfig, ranks: Ranks, whole: Trainer | None) -> Trainer:
    """This rank's part of rank 0's `whole`."""
    kind = "cuda" if cfg.device.startswith("cuda") else "cpu"
    if kind == "cuda":
        cfg = msgspec.structs.replace(cfg, device=f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(cfg.device)
    mesh = init_device_mesh(kind, (ranks.size,))
    model = Decoder(DecoderConfig.from_hf(begin.model)).to(cfg.device)
    shard(model, cfg, mesh)
    sources = dict(whole.model.named_parameters()) if whole else {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            scatter(sources.get(name), p)
    trainer = Trainer(model, cfg, begin.temperature, begin.updates, begin.skipped, ranks=ranks)
    if begin.moments:
        _scatter_moments(trainer, whole)
    return trainer


def shard(model: Decoder, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    """Every layer on its own, the ends of the model together. Master weights and sums of gradients are float32,
    whatever `learner.dtype` computes with."""
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, cfg.dtype), reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cfg.fsdp.offload else OffloadPolicy()
    for module in model.modules():
        if isinstance(module, Router):
            fully_shard(module, mesh=mesh, offload_policy=offload)  # stays float32
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def scatter(source: torch.Tensor | None, target: torch.Tensor) -> None:
    """Rank 0's whole tensor `source` into the shards of `target`."""
    assert isinstance(target, DTensor)
    device = target.device_mesh.device_type
    full = (
        torch.empty(target.shape, dtype=target.dtype, device=device)
        if source is None
        else source.detach().to(device)
    )
    spread = distribute_tensor(full, target.device_mesh, target.placements)
    target.to_local().copy_(spread.to_local())


def gather(source: torch.Tensor, target: torch.Tensor | None) -> None:
    """The shards of `source` into rank 0's whole `target`."""
    assert isinstance(source, DTensor)
    full = source.full_tensor()
    if target is not None:
        target.copy_(full)


@torch.no_grad()
def gather_weights(shard: Trainer, whole: Trainer | None) -> None:
    targets = dict(whole.model.named_parameters()) if whole else {}
    for name, p in shard.model.named_parameters():
        gather(p, targets.get(name))


def _slots(trainer: Trainer) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """(parameter, its optimizer state), in the optimizer's order."""
    optimizer = trainer.optimizer
    return [(p, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def gather_moments(shard: Trainer, whole: Trainer | None) -> None:
    targets = _slots(whole) if whole else None
    for i, (_, slot) in enumerate(_slots(shard)):
        if not slot:
            continue
        mine = None
        if targets:
            p, mine = targets[i]
            for name in MOMENTS:
                mine.setdefault(name, torch.empty_like(p))
            mine["step"] = slot["step"].detach().cpu().clone()
        for name in MOMENTS:
            gather(slot[name], mine[name] if mine else None)


@torch.no_grad()
def _scatter_moments(shard: Trainer, whole: Trainer | None) -> None:
    sources = _slots(whole) if whole else None
    for i, (p, slot) in enumerate(_slots(shard)):
        theirs = sources[i][1] if sources else {}
        count = theirs.get("step", torch.zeros(())).detach().cpu().clone()
        dist.broadcast(count, 0)
        slot["step"] = count.to(p.device) if shard.cfg.device.startswith("cuda") else count
        for name in MOMENTS:
            slot[name] = torch.zeros_like(p)
            scatter(theirs.get(name), slot[name])
