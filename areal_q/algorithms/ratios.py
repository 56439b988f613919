"""Log-ratios from log-probabilities: checked, masked, at least float32, and bounded before any exp."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from areal_q.algorithms.loss_types import LossInputs
from areal_q.config.objectives import Level
from areal_q.errors import RecordError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 nats before exp, so that a ratio stays within [2e-9, 4.9e8] and its square
finite in float32. A clamped policy ratio has no gradient: so large a move within the updates on one batch is
an error, not information. policy/bounded_tokens counts the clamped tokens."""


LOGPROBS_AND_ADVANTAGES = ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages")


@dataclass(frozen=True)
class Ratios:
    """The log-ratios of T tokens in nats, float32 or float64, not clamped. They and A are 0 outside `mask`."""

    log_ratio: Tensor
    """[T] log R = log π_θ - log π_prox, with gradient."""
    log_mismatch: Tensor
    """[T] log w = log π_prox - log π_behav, without gradient."""
    logprobs: Tensor
    """[T] log π_θ, with gradient."""
    advantages: Tensor
    """[T] advantage A, without gradient."""
    mask: Tensor
    """bool [T]: True on tokens that count."""
    sequence_ids: Tensor
    """int64 [T] in 0 … S-1."""
    num_sequences: int
    version_lag: Tensor
    """int64 [T]: the learner's version minus that of the weights that drew the token."""
    all_count: bool
    """True if no token is masked."""
    share: Tensor | None = None
    """[T] the share in which each token's sequence stands for its episode; None if each is 1"""

    @cached_property
    def lengths(self) -> Tensor:
        """Number of tokens that count in each sequence, [S]."""
        return self.count_by_sequence(self.mask)

    @cached_property
    def _sizes(self) -> Tensor:
        """Number of tokens of each sequence, counted or not, int64 [S]."""
        ids = torch.arange(self.num_sequences + 1, device=self.sequence_ids.device)
        return torch.searchsorted(self.sequence_ids, ids).diff()

    def everywhere(self, counted: Tensor) -> bool:
        """Returns True if `counted` is the mask, and True for every token."""
        return self.all_count and counted is self.mask

    def count_by_sequence(self, counted: Tensor) -> Tensor:
        """Returns for how many tokens of each sequence `counted`, bool [T], is True, [S]."""
        dtype = self.advantages.dtype
        if self.everywhere(counted):
            return self._sizes.to(dtype)
        return self.sequence_sum(counted.to(dtype))

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [T] over each sequence, [S]. Five times as fast as index_add, because the
        tokens of a sequence are neighbours."""
        return torch.segment_reduce(values, "sum", lengths=self._sizes, unsafe=True)

    def per_sequence(self, log_ratio: Tensor, level: Level = "geometric") -> Tensor:
        """Returns for each token [T] the sum (`product`) or the mean (`geometric`) of its sequence's
        log-ratios, or its own (`token`)."""
        if level == "token":
            return log_ratio
        total = self.sequence_sum(log_ratio)
        if level == "geometric":
            total = total / self.lengths.clamp(min=1)
        return total.index_select(0, self.sequence_ids)


def ratios(inputs: LossInputs) -> Ratios:
    """Returns the log-ratios of `inputs`. Raises RecordError, naming sequence and token, if a counted log-prob
    or advantage is not finite."""
    mask = inputs.mask
    require_finite(inputs, *LOGPROBS_AND_ADVANTAGES)
    given = [getattr(inputs, name) for name in LOGPROBS_AND_ADVANTAGES]
    double = any(x.dtype == torch.float64 for x in given)
    dtype = torch.float64 if double else torch.float32
    logprobs = given[0].to(dtype)
    proximal, behavior, advantages = (x.detach().to(dtype) for x in given[1:])
    # Masked tokens may hold anything and are replaced before exp: 0 · inf would put NaN into the gradient.
    all_count = int(mask.count_nonzero()) == len(mask)

    def counted(values: Tensor) -> Tensor:
        return values if all_count else torch.where(mask, values, 0.0)

    logprobs = counted(logprobs)
    return Ratios(
        log_ratio=logprobs - counted(proximal),
        log_mismatch=counted(proximal - behavior),
        logprobs=logprobs,
        advantages=counted(advantages),
        mask=mask,
        sequence_ids=inputs.sequence_ids,
        num_sequences=inputs.num_sequences,
        version_lag=inputs.version_lag,
        all_count=all_count,
        share=None if inputs.share is None else inputs.share.to(dtype),
    )


def interpolated_proximal(logprobs: Tensor, behavior: Tensor, version_lag: Tensor) -> Tensor:
    """Returns an approximation of log π_prox [T] from log π_θ, log π_behav and the versions by which π_behav is
    behind π_prox (A-3PO, arXiv 2512.06547): log π_behav + α (log π_θ - log π_behav).

    α = (v_prox - v_behav) / (v_θ - v_behav), where π_θ is on its way to the version after π_prox: with a lag of
    n versions it is n / (n + 1). Example: lags 0, 1 and 3 have α = 0, 1/2 and 3/4.
    """
    share = version_lag / (version_lag + 1)
    return behavior + share * (logprobs - behavior)


def bounded(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratios clamped to ±MAX_LOG_RATIO: the very tensor where none is beyond, which is nearly
    always, so that there is no clamp to go back through."""
    largest = log_ratio.detach().abs().max().item() if log_ratio.numel() else 0.0
    within = largest <= MAX_LOG_RATIO
    return log_ratio if within else log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return bounded(log_ratio).exp()


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Returns the sum of `values` [N] over each segment, [num_segments].

    On a GPU it is deterministic only under torch.use_deterministic_algorithms.
    """
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def optional(inputs: LossInputs, x: Ratios, name: str) -> Tensor:
    """Returns the input `name` [T], which only some losses need, 0 where masked and of the ratios' dtype.

    Raises RecordError if it was not given, or a counted value is not finite.
    """
    tensor: Tensor | None = getattr(inputs, name)
    if tensor is None:
        raise RecordError(f"the loss needs {name}, which was not given")
    require_finite(inputs, name)
    return torch.where(x.mask, tensor, 0.0).to(x.advantages.dtype)


@torch.no_grad()
def require_finite(inputs: LossInputs, *names: str) -> None:
    """Raises RecordError, naming sequence (by its label) and token, if one of the inputs `names` is not finite
    at a token that counts."""
    given = {name: getattr(inputs, name) for name in names}
    # A sum is finite only if all its terms are. One that is not may still come from a masked token or from
    # overflow, and then the search below finds nothing.
    sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in given.values()]
    if torch.stack(sums).sum().isfinite():
        return
    for name, values in given.items():
        bad = (~torch.isfinite(values) & inputs.mask).nonzero()
        if len(bad):
            index = int(bad[0])
            sequence = int(inputs.sequence_ids[index])
            token = index - int((inputs.sequence_ids < sequence).sum())
            found = values[index].item()
            where = inputs.labels[sequence] if inputs.labels else f"sequence {sequence}"
            raise RecordError(f"{where}, token {token}: {name} is {found}")
