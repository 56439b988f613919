"""Log-probs and entropies over a vocabulary whose rows are divided among tensor-parallel ranks.

Every rank reduces its own columns (areal_q/models/logprobs.py) without [T, V] logits in memory, and the ranks
exchange three numbers per token. With lse_r and H_r the log-sum-exp and the entropy over rank r's columns, and
p_r = exp(lse_r - lse):

    lse = log Σ_r exp(lse_r)        H = Σ_r p_r (H_r - log p_r)
"""
# pyright: reportMissingImports=false

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

from areal_q.models.logprobs import blocks
from learner.backends.megatron.model import MegatronModel
from learner.backends.megatron.tensor_names import padded
from learner.data.packing import PackedBatch


def parallel_token_logprobs(
    model: MegatronModel,
    batch: PackedBatch,
    hidden: Tensor,
    temperature: float,
    entropy_learns: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each response token and the entropy of its distribution, float32 [T] nats, from
    the hidden states [N, 1, D] of the last stage."""
    rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    vocab = model.shape.vocab_size
    first = rank * padded(vocab, size) // size
    return vocab_logprobs(
        copy_to_tensor_model_parallel_region(hidden[batch.predict, 0]),
        model.head[: vocab - first],
        first,
        batch.targets,
        temperature,
        entropy_learns,
        ps.get_tensor_model_parallel_group(),
    )


def vocab_logprobs(
    hidden: Tensor,
    weight: Tensor,
    first: int,
    targets: Tensor,
    temperature: float,
    entropy_learns: bool,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Returns (log-prob of each target, entropy), float32 [T] nats, the same on all ranks of `group`.

    `hidden` [T, D] is the same on all ranks; `weight` [V / n, D] has this rank's rows of the head, from `first`
    on. The gradient of `hidden` is this rank's share, to be summed over the ranks.
    """
    own = torch.stack(blocks(hidden, weight, targets - first, temperature))
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own.detach(), group=group)
    every[dist.get_rank(group)] = own  # the one with a gradient
    chosen, lses, entropies = torch.stack(every, 1)
    lse = lses.logsumexp(0)
    with torch.set_grad_enabled(entropy_learns and torch.is_grad_enabled()):
        logp = lses - lse
        entropy = (logp.exp() * (entropies - logp)).sum(0)
    return chosen.sum(0) - lse, entropy
