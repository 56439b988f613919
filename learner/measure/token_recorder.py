"""Recording of each token's scores during a step, for the token log; it has no influence on the step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, PolicyLoss
from buffer.logs.token_log import MARKS, TokenScores
from learner.data.packing import PackedBatch


class TokenRecorder:
    """Records, on the CPU, every token's scores in the last update of a step that used the token."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._seen: dict[tuple[int, int], tuple[PackedBatch, dict[str, np.ndarray]]] = {}

    def begin(self, batches: Sequence[PackedBatch]) -> None:
        """Begins a new step, whose micro-batches are `batches`, and forgets the last one."""
        self._order, self._seen = [batch.responses[0] for batch in batches], {}

    def add(
        self, batch: PackedBatch, before: LossInputs, visit: LossInputs, out: PolicyLoss
    ) -> None:
        """Records the inputs `visit` and the result `out` of one update on a micro-batch, which a later update
        replaces. `before` are the inputs from before the first update, when π_θ was π_prox."""
        assert before.entropy is not None
        columns = {
            "proximal_logprobs": before.proximal_logprobs,
            "logprobs": visit.logprobs,
            "entropy": before.entropy,
            "advantages": visit.advantages,
            "lag": visit.version_lag.int(),
            "marks": marks(out),
            "behavior_logprobs": visit.behavior_logprobs,
            "mask": visit.mask,
        }
        self._seen[batch.responses[0]] = (
            batch,
            {name: column.detach().cpu().numpy() for name, column in columns.items()},
        )

    def scores(self) -> TokenScores:
        """Returns the scores of the step begun last, in the order of its micro-batches."""
        batches, columns = zip(*(self._seen[first] for first in self._order), strict=True)
        responses = np.array([r for batch in batches for r in batch.responses], np.int64)
        joined = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
        lengths = [torch.bincount(b.sequence_ids, minlength=b.num_sequences) for b in batches]
        return TokenScores(
            number=responses[:, 0],
            index=responses[:, 1],
            lengths=torch.cat(lengths).cpu().numpy(),
            **joined,
        )


def marks(out: PolicyLoss) -> Tensor:
    """Returns uint8 [T]: the sum of the MARKS that hold for each token."""
    total = torch.zeros_like(out.objective, dtype=torch.uint8)
    for name, bit in MARKS.items():
        flags = None if name == "dropped" else getattr(out, name)
        if name == "dropped" and out.kept is not None:
            flags = ~out.kept
        if flags is not None:
            total += flags.to(torch.uint8) * bit
    return total
