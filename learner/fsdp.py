"""A policy sharded with torch's FSDP2: layer by layer, over gloo on CPUs and NCCL on GPUs.

    whole (rank 0) ──scatter──▶ shard of every rank: all-gather, forward, backward, reduce-scatter, AdamW
                   ◀──gather───

Where the forward has numbers of its own (areal_q/models/aligned.py), every rank quantizes the gathered
weights for itself after an update, all to the same bits, and rank 0 publishes the very tensors of its forward.
LoRA's frozen base is packed, and whole on every rank; its adapters are sharded.
"""

import os
from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_q.config import LearnerConfig, Run, TorchBackend
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.aligned import QuantLinear, linears, materialise
from areal_q.models.moe import Router
from learner.critic import Critic
from learner.optim import build_optimizer
from learner.precision import set_precision
from learner.ranks import Ranks
from learner.sharded import Begin
from learner.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpShard(Trainer):
    """This rank's part of rank 0's whole trainer, parameter by parameter of the same names."""

    @torch.no_grad()
    def gather_weights(self, whole: Trainer | None) -> None:
        _gather_parameters(self.model, whole.model if whole else None)
        if whole:
            own = linears(self.model)
            for name, linear in linears(whole.model).items():
                if isinstance(linear, QuantLinear):
                    linear.take(own[name].parts)  # type: ignore[arg-type]

    @torch.no_grad()
    def gather_rest(self, whole: Trainer | None) -> None:
        _gather_moments(self.optimizer, whole.optimizer if whole else None)
        if self.critic is not None:
            theirs = whole.critic if whole else None
            _gather_parameters(self.critic, theirs)
            _gather_moments(self.critic.optimizer, theirs.optimizer if theirs else None)

    @torch.no_grad()
    def share_of_rest(self, whole: Trainer | None) -> dict[str, Tensor]:
        optimizers = {"optimizer": self.optimizer}
        if self.critic is not None:
            _gather_parameters(self.critic, whole.critic if whole else None)
            optimizers["critic_optimizer"] = self.critic.optimizer
        kept: dict[str, Tensor] = {}
        for part, optimizer in optimizers.items():
            for i, (_, slot) in enumerate(_slots(optimizer)):
                for name, value in slot.items():
                    tensor = value.full_tensor() if isinstance(value, DTensor) else value
                    if i % self.ranks.size == self.ranks.rank:
                        kept[f"{part}.{i}.{name}"] = tensor.detach().cpu().contiguous()
        return kept

    @torch.no_grad()
    def reset_reference(self) -> None:
        assert self.reference is not None
        pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
        for frozen, own in pairs:
            _local(frozen).copy_(_local(own))
        materialise(self.reference)


def fsdp_shard(begin: Begin, run: Run, ranks: Ranks, whole: Trainer | None) -> FsdpShard:
    """Collective: this rank's part of rank 0's `whole`."""
    cfg = run.learner
    kind = "cuda" if cfg.device.startswith("cuda") else "cpu"
    if kind == "cuda":
        cfg = msgspec.structs.replace(cfg, device=f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(cfg.device)
    mesh = init_device_mesh(kind, (ranks.size,))
    run = msgspec.structs.replace(run, learner=cfg)

    def policy() -> Decoder:
        model = Decoder(DecoderConfig.from_hf(begin.model)).to(cfg.device)
        set_precision(model, run)
        return model

    model = policy()
    critic = Critic(model, cfg.critic) if cfg.critic else None
    shard(model, cfg, mesh)
    _scatter_state(whole.model if whole else None, model)
    materialise(model)
    reference = None
    if cfg.reference_kl and not cfg.lora:
        reference = policy().requires_grad_(False)
        shard(reference, cfg, mesh)
        _scatter_state(whole.reference if whole else None, reference)
        materialise(reference)
    if critic:
        _shard_critic(critic, cfg, mesh)
        _scatter_state(whole.critic if whole else None, critic)
    trainer = FsdpShard(
        model,
        cfg,
        begin.temperature,
        begin.updates,
        begin.skipped,
        ranks=ranks,
        critic=critic,
        reference=reference,
    )
    if begin.moments:
        _scatter_moments(whole.optimizer if whole else None, trainer.optimizer)
        if critic:
            theirs = whole.critic.optimizer if whole and whole.critic else None
            _scatter_moments(theirs, critic.optimizer)
    return trainer


def shard(model: Decoder, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    """Every layer on its own, the ends of the model together. Master weights and sums of gradients are float32,
    whatever `learner.dtype` computes with."""
    _shard_routers(model, cfg, mesh)
    for layer in model.model.layers:
        _shard(layer, cfg, mesh)
    _shard(model, cfg, mesh)


def _shard_critic(critic: Critic, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    if critic.trunk is not None:
        _shard_routers(critic.trunk, cfg, mesh)
        for layer in critic.trunk.layers:
            _shard(layer, cfg, mesh)
    _shard(critic, cfg, mesh)
    critic.optimizer = build_optimizer(critic, critic.cfg.optimizer)


def _shard_routers(model: nn.Module, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    """They stay float32."""
    exact = msgspec.structs.replace(cfg, dtype="float32")
    for module in model.modules():
        if isinstance(module, Router):
            _shard(module, exact, mesh)


def _shard(module: nn.Module, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    assert isinstance(cfg.backend, TorchBackend)
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, cfg.dtype), reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cfg.backend.offload else OffloadPolicy()
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)


def _local(p: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    return p.to_local()


def scatter(source: Tensor | None, target: Tensor) -> None:
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


def gather(source: Tensor, target: Tensor | None) -> None:
    """The shards of `source` into rank 0's whole `target`."""
    assert isinstance(source, DTensor)
    full = source.full_tensor()
    if target is not None:
        target.copy_(full)


@torch.no_grad()
def _scatter_state(whole: nn.Module | None, module: nn.Module) -> None:
    """Parameters into shards; buffers, such as a frozen base's codes, are whole on every rank."""
    sources = dict(whole.named_parameters()) if whole else {}
    for name, p in module.named_parameters():
        scatter(sources.get(name), p)
    buffers = dict(whole.named_buffers()) if whole else {}
    for name, own in module.named_buffers():
        if name in buffers:
            own.copy_(buffers[name])
        # As bytes: not every collective knows every number format.
        data = own.reshape(-1).view(torch.uint8)
        dist.broadcast(data, 0)


def _gather_parameters(module: nn.Module, whole: nn.Module | None) -> None:
    """Of those that learn: others are as they were."""
    targets = dict(whole.named_parameters()) if whole else {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            gather(p, targets.get(name))


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(parameter, its state), in the optimizer's order."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p, optimizer.state[p]


def _gather_moments(own: torch.optim.Optimizer, whole: torch.optim.Optimizer | None) -> None:
    targets = list(_slots(whole)) if whole else None
    for i, (_, slot) in enumerate(_slots(own)):
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
def _scatter_moments(whole: torch.optim.Optimizer | None, own: torch.optim.Optimizer) -> None:
    sources = list(_slots(whole)) if whole else None
    for i, (p, slot) in enumerate(_slots(own)):
        theirs = sources[i][1] if sources else {}
        count = theirs.get("step", torch.zeros(())).detach().cpu().clone()
        dist.broadcast(count, 0)
        slot["step"] = count.to(p.device) if p.is_cuda else count
        for name in MOMENTS:
            slot[name] = torch.zeros_like(p)
            scatter(theirs.get(name), slot[name])
