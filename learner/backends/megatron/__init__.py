"""The backend in Megatron-core 0.16: tensor, pipeline, context and data parallelism, schedules and optimizer.

    policy.py        the backend's methods          model.py         GPTModel for packed batches
    schedule.py      a pipeline's stages            settings.py      our settings as Megatron's
    tensor_names.py  names and shards of tensors    shard_state.py   scattering, gathering
    ddp_module.py    a module with its optimizer    critic.py        the critic beside the policy
    cuda_shim.py     CUDA's stand-in on a CPU       layers/          log-probs over a sharded vocabulary,
                                                                     quantized forward, LoRA, router

Megatron needs neither Transformer Engine nor Apex here. Its own checkpoints are not used: checkpoints are those
of a single process (learner/checkpoint/files.py), so that a run can resume with any layout, or on the torch
backend.
"""

from areal_q.checks.packages import check_megatron
from areal_q.config import MegatronBackend
from areal_q.errors import ConfigError


def require(backend: MegatronBackend, size: int) -> None:
    """Raises ConfigError if Megatron is not installed, or its ranks do not fill `size` processes."""
    check_megatron()
    if size % (backend.tensor * backend.pipeline * backend.context):
        raise ConfigError(
            f"learner.backend: tensor = {backend.tensor} times pipeline = {backend.pipeline} times "
            f"context = {backend.context} does not divide {size} processes"
        )
    if size // backend.pipeline % backend.experts:
        raise ConfigError(
            f"learner.backend.experts = {backend.experts} does not divide the "
            f"{size // backend.pipeline} processes of a pipeline's stage"
        )
