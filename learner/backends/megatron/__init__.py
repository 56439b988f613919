"""The backend in Megatron-core 0.16: tensor, pipeline and data parallelism, its schedules and optimizer.

    policy.py   the backend's methods                         schedule.py  what runs over a pipeline's stages
    model.py    GPTModel for packed batches                   settings.py  our configuration as Megatron's
    names.py    Hugging Face's tensors ◀──▶ a rank's shards   state.py     the whole, scattered and gathered
    vocab.py    log-probs over a vocabulary that ranks share  learnt.py    a module with its optimizer
    aligned.py  the forward on the rollouts' numbers          critic.py    beside the policy
    lora.py     adapters on a frozen base                     moe.py       the router of its MoELayer
    cpu.py      what stands for CUDA on a CPU

Megatron needs neither Transformer Engine nor Apex here. Its own checkpoints are not used: a run's are those
of one process (learner/checkpoint/files.py), so that it goes on with any layout, or with the torch backend.
"""

import importlib.util

from areal_q.config import MegatronBackend
from areal_q.errors import ConfigError


def require(backend: MegatronBackend, size: int) -> None:
    """Raises ConfigError where Megatron is not installed, or its ranks do not fill `size` processes."""
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError(
            "learner.backend.type = 'megatron' needs megatron-core: pip install 'areal-q[megatron]'"
        )
    if size % (backend.tensor * backend.pipeline):
        raise ConfigError(
            f"learner.backend: tensor = {backend.tensor} times pipeline = {backend.pipeline} "
            f"does not divide {size} processes"
        )
    if size // backend.pipeline % backend.experts:
        raise ConfigError(
            f"learner.backend.experts = {backend.experts} does not divide the "
            f"{size // backend.pipeline} processes of a pipeline's stage"
        )
