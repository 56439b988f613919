"""Recording of each token's scores during a step, for the token log; it has no influence on the step."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from areal_q.algorithms import LossInputs, PolicyLoss
from buffer.logs.token_log import MARKS, TokenScores
from learner.data.packing import PackedBatch

_Path = tuple[int, int, int]
"""Ticket, index and branch, as in PackedBatch.responses"""


class TokenRecorder:
    """Records, on the CPU, every token's scores in the last update of a step that used the token."""

    def __init__(self) -> None:
        self._order: list[_Path] = []
        self._seen: dict[_Path, tuple[PackedBatch, dict[str, np.ndarray]]] = {}

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
        """Returns the scores of the step begun last, in the order of its micro-batches. A response's paths are
        one after the other."""
        batches, columns = zip(*(self._seen[first] for first in self._order), strict=True)
        paths = [path for batch in batches for path in batch.responses]
        joined = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
        counts = [torch.bincount(b.sequence_ids, minlength=b.num_sequences) for b in batches]
        lengths = torch.cat(counts).cpu().numpy()
        if any(branch for _, _, branch in paths):
            starts, seen = np.cumsum(lengths) - lengths, dict[tuple[int, int], int]()
            for number, index, _ in paths:
                seen.setdefault((number, index), len(seen))
            order = sorted(range(len(paths)), key=lambda i: (seen[paths[i][:2]], paths[i][2]))
            places = np.concatenate([starts[i] + np.arange(lengths[i]) for i in order])
            joined = {name: column[places] for name, column in joined.items()}
            rows = [seen[path[:2]] for path in paths]
            lengths = np.bincount(rows, weights=lengths).astype(np.int64)
            paths = [(*response, 0) for response in seen]
        responses = np.array(paths, np.int64)
        return TokenScores(number=responses[:, 0], index=responses[:, 1], lengths=lengths, **joined)


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
