"""A policy that torch's FSDP2 shards layer by layer, over gloo on CPUs and NCCL on GPUs.

    whole (rank 0) ──scatter──▶ shard of every rank: all-gather, forward, backward, reduce-scatter, optimizer
                   ◀──gather───

With a quantized forward (areal_q/models/low_bit/quantized_forward.py) every rank quantizes the gathered weights
itself after an update, all to the same bits, and rank 0 publishes the very tensors of its forward. LoRA's
frozen base is quantized, and whole on every rank; the adapters are sharded.
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
from areal_q.models.hf.checkpoint import meta_decoder, new_decoder
from areal_q.models.layers.gated_delta import GatedDelta
from areal_q.models.layers.moe import ExactLinear
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears, materialise
from learner.backends.critic import Critic
from learner.backends.data_parallel import ALONE, Ranks
from learner.backends.messages import Begin
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.optim.adamw_8bit import LARGEST, AdamW8bit, ParameterShard
from learner.optim.dtensor import local


class FsdpShard(TorchPolicy):
    """This rank's part of rank 0's whole policy; the parameters have the same names."""

    @torch.no_grad()
    def gather_weights(self, whole: TorchPolicy | None) -> None:
        _gather_parameters(self.model, whole.model if whole else None)
        if whole:
            own = linears(self.model)
            for name, linear in linears(whole.model).items():
                if isinstance(linear, QuantLinear) and isinstance(mine := own[name], QuantLinear):
                    device = linear.weight.device
                    linear.take({part: t.to(device) for part, t in mine.parts.items()})

    @torch.no_grad()
    def gather_rest(self, whole: TorchPolicy | None) -> None:
        _gather_moments(self.optimizer, whole.optimizer if whole else None)
        if self.critic is not None:
            whole_critic = whole.critic if whole else None
            _gather_parameters(self.critic, whole_critic)
            _gather_moments(self.critic.optimizer, whole_critic.optimizer if whole_critic else None)

    @torch.no_grad()
    def share_of_rest(self, whole: TorchPolicy | None) -> dict[str, Tensor]:
        optimizers = {"optimizer": self.optimizer}
        if self.critic is not None:
            _gather_parameters(self.critic, whole.critic if whole else None)
            optimizers["critic_optimizer"] = self.critic.optimizer
        kept: dict[str, Tensor] = {}
        for part, optimizer in optimizers.items():
            for i, (p, slot) in enumerate(_slots(optimizer)):
                for name, value in slot.items():
                    tensor = _joined(p, name, value)
                    if i % dist.get_world_size() == dist.get_rank():
                        kept[f"{part}.{i}.{name}"] = tensor.detach().cpu().contiguous()
        return kept

    @torch.no_grad()
    def reset_reference(self) -> None:
        assert self.reference is not None
        pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
        for frozen, own in pairs:
            local(frozen).copy_(local(own))
        materialise(self.reference)

    def close(self) -> None:
        """Does nothing: with the group of all ranks those of some end, too."""


def fsdp_shard(begin: Begin, run: Run, ranks: Ranks, whole: TorchPolicy | None) -> FsdpShard:
    """Returns this rank's part of rank 0's `whole` policy. Collective."""
    cfg = run.learner
    kind = "cuda" if cfg.device.startswith("cuda") else "cpu"
    if kind == "cuda":
        cfg = msgspec.structs.replace(cfg, device=f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(cfg.device)
    mesh = init_device_mesh(kind, (ranks.size,))
    data, context = _data_and_context(cfg, ranks)

    def decoder() -> Decoder:
        config = DecoderConfig.from_hf(begin.model)
        model = meta_decoder(config) if _fills(cfg) else new_decoder(config).to(cfg.device)
        set_precision(model.requires_grad_(True), run)
        return model

    model = decoder()
    critic = Critic(model, cfg.critic) if cfg.critic else None
    _shard_decoder(model, whole.model if whole else None, cfg, mesh)
    reference = None
    if cfg.reference_kl and not cfg.lora:
        reference = decoder().requires_grad_(False)
        _shard_decoder(reference, whole.reference if whole else None, cfg, mesh)
    if critic:
        _shard_critic(critic, cfg, mesh)
        _fill(whole.critic if whole else None, critic, cfg)
    policy = FsdpShard(
        model, cfg, begin.temperature, begin.updates, begin.skipped,
        ranks=data, context=context, critic=critic, reference=reference,
    )  # fmt: skip
    if begin.moments:
        _scatter_moments(whole.optimizer if whole else None, policy.optimizer, ranks)
        if critic:
            whole_optimizer = whole.critic.optimizer if whole and whole.critic else None
            _scatter_moments(whole_optimizer, critic.optimizer, ranks)
    return policy


def _fills(cfg: LearnerConfig) -> bool:
    """Returns True if a model has no values before it is sharded, so that no rank needs room for a whole one.
    LoRA's base is whole on every rank, and an offloaded model's buffers stay on the GPU."""
    assert isinstance(cfg.backend, TorchBackend)
    return not (cfg.lora or cfg.backend.offload)


def _shard_decoder(
    model: Decoder, whole: Decoder | None, cfg: LearnerConfig, mesh: DeviceMesh
) -> None:
    """Makes `model` this rank's shard of rank 0's `whole` one. Collective."""
    shard(model, cfg, mesh)
    _fill(whole, model, cfg)
    materialise(model)


def _data_and_context(cfg: LearnerConfig, ranks: Ranks) -> tuple[Ranks, Ranks]:
    """Returns the ranks that divide the samples, and those with this one that share a micro-batch: neighbours,
    as they send each other more. Collective."""
    size = cfg.context
    if size == 1:
        return ranks, ALONE
    rows = [list(range(first, first + size)) for first in range(0, ranks.size, size)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    data, _ = dist.new_subgroups_by_enumeration(columns)
    context, _ = dist.new_subgroups_by_enumeration(rows)
    assert isinstance(data, dist.ProcessGroup) and isinstance(context, dist.ProcessGroup)
    return (
        Ranks(ranks.rank // size, ranks.size // size, data),
        Ranks(ranks.rank % size, size, context),
    )


def shard(model: Decoder, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    """Shards every layer separately, and the rest of the model (embedding, last norm, head) together. Master
    weights and sums of gradients are float32, whatever `learner.dtype` is."""
    _shard_exact(model, cfg, mesh)
    for layer in model.prepare_sharding():
        _shard(layer, cfg, mesh)
    _shard(model, cfg, mesh)


def _shard_critic(critic: Critic, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    if critic.trunk is not None:
        _shard_exact(critic.trunk, cfg, mesh)
        for layer in critic.trunk.prepare_sharding():
            _shard(layer, cfg, mesh)
    _shard(critic, cfg, mesh)


def _shard_exact(model: nn.Module, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    """Shards what chooses experts and the delta rule separately, as they compute in float32 always."""
    exact = msgspec.structs.replace(cfg, dtype="float32")
    for module in model.modules():
        if isinstance(module, ExactLinear | GatedDelta):
            _shard(module, exact, mesh)


def _shard(module: nn.Module, cfg: LearnerConfig, mesh: DeviceMesh) -> None:
    assert isinstance(cfg.backend, TorchBackend)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.products), reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy() if cfg.backend.offload else OffloadPolicy()
    fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)


def scatter(source: Tensor | None, target: Tensor) -> None:
    """Copies rank 0's whole tensor `source` into the shards of `target`. Collective."""
    assert isinstance(target, DTensor)
    device = target.device_mesh.device_type
    full = (
        torch.empty(target.shape, dtype=target.dtype, device=device)
        if source is None
        else source.detach().to(device)
    )
    spread = distribute_tensor(full, target.device_mesh, target.placements)
    target.to_local().copy_(spread.to_local())


@torch.no_grad()
def _fill(whole: nn.Module | None, module: nn.Module, cfg: LearnerConfig) -> None:
    """Copies rank 0's parameters into the shards, and its buffers, such as a frozen base's codes,
    to every rank. Collective."""
    if _fills(cfg):
        module.to_empty(device=cfg.device)
    sources = dict(whole.named_parameters()) if whole else {}
    for name, p in module.named_parameters():
        scatter(sources.get(name), p)
    buffers = dict(whole.named_buffers()) if whole else {}
    for name, own in module.named_buffers():
        if name in buffers:
            own.copy_(buffers[name])
        # They are sent as bytes, because not every collective supports every number format.
        data = own.reshape(-1).view(torch.uint8)
        dist.broadcast(data, 0)


def _gather_parameters(module: nn.Module, whole: nn.Module | None) -> None:
    """Copies the shards of trainable parameters into rank 0's `whole`. Collective."""
    targets = dict(whole.named_parameters()) if whole else {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            assert isinstance(p, DTensor)
            full = p.full_tensor()
            if name in targets:
                targets[name].copy_(full)


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields (parameter, its optimizer state), in the optimizer's order."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p, optimizer.state[p]


def _joined(p: Tensor, name: str, value: Tensor) -> Tensor:
    """Returns a value of p's optimizer state as a single process would have it. Collective."""
    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.flatten() if value.dtype == torch.uint8 else whole  # whole codes are flat
    return ParameterShard(p).joined(value) if name.endswith(LARGEST) else value


def _gather_moments(own: torch.optim.Optimizer, whole: torch.optim.Optimizer | None) -> None:
    targets = list(_slots(whole)) if whole else None
    for i, (p, slot) in enumerate(_slots(own)):
        for name, value in slot.items():
            joined = _joined(p, name, value).detach()
            if targets:
                # On the host, whatever holds the weights: they are written, and forgotten.
                targets[i][1][name] = joined.to("cpu", copy=True)


@torch.no_grad()
def _scatter_moments(
    whole: torch.optim.Optimizer | None, own: torch.optim.Optimizer, ranks: Ranks
) -> None:
    sources = [slot for _, slot in _slots(whole)] if whole else []
    kinds = [
        {k: float(v) if k == "step" else str(v.dtype) for k, v in slot.items()} for slot in sources
    ]
    received = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(kinds)))
    for i, (p, slot) in enumerate(_slots(own)):
        for name, kind in received[i].items():
            source = sources[i][name] if sources else None
            if name == "step":
                eight = isinstance(own, AdamW8bit)
                slot[name] = torch.tensor(kind, device="cpu" if eight else p.device)
            elif name.endswith(LARGEST):
                slot[name] = _own_maxima(p, source)
            else:
                dtype = getattr(torch, kind.removeprefix("torch."))
                slot[name] = torch.zeros_like(p, dtype=dtype)
                scatter(source.view(p.shape) if source is not None else None, slot[name])


def _own_maxima(p: Tensor, source: Tensor | None) -> Tensor:
    part = ParameterShard(p)
    found = torch.empty(part.all_blocks, device=p.device) if source is None else source.to(p.device)
    dist.broadcast(found, 0)
    return part.own(found)
