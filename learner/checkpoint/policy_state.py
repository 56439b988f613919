"""The tensors of a policy in a checkpoint, by their names there, and how they are loaded into a policy."""

from pathlib import Path

import torch
from torch import nn

from areal_q.config import Run
from areal_q.errors import CheckpointError
from areal_q.models import Decoder
from areal_q.models.low_bit.quantized_forward import materialise
from areal_q.models.smoothed_state import scales_of
from areal_q.system.files import clear_leftovers
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.checkpoint.files import (
    State,
    Tensors,
    clear_shares,
    read_state,
    read_tensors,
    steps,
    write,
)
from learner.publishing.version_builder import new_ranges

KV, STICKY, SMOOTHING = "kv_scales.", "sticky.", "smoothing."


def policy_of(model: Decoder, run: Run) -> TorchPolicy:
    """Returns a policy of `model` with the settings of `run`, which begins anew, or into which a checkpoint can
    be loaded."""
    set_precision(model, run)
    policy = TorchPolicy(model, run.learner, run.rollout.sampling.temperature)
    policy.calibrate = run.rollout.kv_scales
    policy.sticky = new_ranges(run)
    if smooths := run.rollout.smooths:
        policy.smoothing = scales_of(model.config, run.rollout.format, smooths)
    return policy


def save(directory: Path, state: State, policy: TorchPolicy, keep: int) -> Path:
    """Writes a checkpoint of the present `policy`; see `write`."""
    return write(directory, state, tensors_of(policy), keep)


def restore(directory: Path, policy: TorchPolicy) -> State:
    """Loads the newest checkpoint into `policy`, and returns its state. Raises CheckpointError that names what
    is damaged and the checkpoint before it, if there is one."""
    clear_leftovers(directory)
    clear_shares(directory)
    complete = steps(directory)
    if not complete:
        raise CheckpointError(f"{directory}: no checkpoint to resume from")
    try:
        state = read_state(complete[-1])
        load(complete[-1], state, policy)
    except CheckpointError as error:
        before = f"; remove it to resume from {complete[-2].name}" if len(complete) > 1 else ""
        raise CheckpointError(f"{error}{before}") from error
    return state


def load(path: Path, state: State, policy: TorchPolicy) -> None:
    """Loads checkpoint `path`, whose state is `state`, into `policy`. Raises CheckpointError that names what is
    damaged or does not fit."""
    try:
        _load(policy, read_tensors(path, state))
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    policy.updates, policy.skipped = state.updates, state.skipped


def tensors_of(policy: TorchPolicy, collected: Tensors | None = None) -> Tensors:
    """Returns all tensors of `policy` that belong into a checkpoint, on the CPU.

    `collected` is the result of PolicyUpdater.collect: what ranks hold together, or this rank's share of it if
    other ranks write theirs.
    """
    tensors: Tensors = {"rng": torch.get_rng_state(), **(collected or {})}
    for part, module in _modules(policy).items():
        tensors |= {f"{part}.{k}": v for k, v in module.state_dict().items()}
    tensors |= moments_of(policy)
    tensors |= {f"{KV}{k}": v for k, v in policy.kv_scales.items()}
    if policy.sticky:
        tensors |= {f"{STICKY}{k}": v for k, v in policy.sticky.tensors().items()}
    if policy.smoothing:
        tensors |= {f"{SMOOTHING}{k}": v for k, v in policy.smoothing.tensors().items()}
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def moments_of(policy: TorchPolicy) -> Tensors:
    """Returns all that the optimizers of `policy` hold."""
    return {
        f"{part}.{i}.{k}": v
        for part, optimizer in _optimizers(policy).items()
        for i, slot in optimizer.state_dict()["state"].items()
        for k, v in slot.items()
    }


def forget_moments(policy: TorchPolicy) -> None:
    """Empties the optimizers of `policy`."""
    for optimizer in _optimizers(policy).values():
        optimizer.state.clear()


def _modules(policy: TorchPolicy) -> dict[str, nn.Module]:
    """Returns the modules by the prefix of their tensors' names."""
    modules = {"model": policy.model, "critic": policy.critic, "reference": policy.reference}
    return {part: module for part, module in modules.items() if module is not None}


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
    if policy.smoothing:
        policy.smoothing.restore(_named(tensors, SMOOTHING, policy.cfg.device))
        policy.fold()
    torch.set_rng_state(tensors["rng"])


def _named(tensors: Tensors, prefix: str, device: str) -> Tensors:
    """Returns the tensors whose names begin with `prefix`, by their names without it."""
    return {
        k.removeprefix(prefix): v.to(device) for k, v in tensors.items() if k.startswith(prefix)
    }
