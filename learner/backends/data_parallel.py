"""Data-parallel ranks of one learner: how they divide the samples, and what they send each other.

Only rank 0 uses Redis, workers and disk. It sends every rank the whole batch, of which each takes its share by
the same rule. Bytes, sums and metrics are sent by torch.distributed's collectives, as msgpack
and never as pickle.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_q.algorithms import Totals
from areal_q.algorithms import reducers as r
from areal_q.algorithms.reducers import Metrics
from areal_q.messages import Array
from learner.data.packing import PATHS, Sample, microbatches

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        r.Mean, r.Sum, r.Max, r.EffectiveSampleShare, r.MeanDifference, r.ExplainedVariance, r.RatioQuantile
    )
}  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the `size` ranks that divide the samples; one alone needs no process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """The process group; None stands for all processes that torchrun started."""

    def cuts(
        self, samples: Sequence[Sample], max_tokens: int, paths: int = PATHS
    ) -> list[Sequence[Sample]]:
        """Returns this rank's `microbatches`. Sharding requires equally many on all ranks, so that a rank with
        fewer gets empty ones in addition."""
        each = [list(microbatches(own, max_tokens, paths)) for own in shares(samples, self.size)]
        own, most = each[self.rank], max(map(len, each))
        return own + [()] * (most - len(own))

    def total(self, own: Totals) -> Totals:
        """Returns token and sequence counts summed over all ranks."""
        if self.size == 1:
            return own
        counts = torch.tensor([own.tokens, own.sequences], dtype=torch.float64)
        tokens, sequences = self.add(counts).tolist()
        return Totals(int(tokens), sequences)

    def add(self, own: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(own, group=self.group)
        return own

    def metrics(self, own: Sequence[Metrics]) -> list[Metrics]:
        """Returns the metrics of all ranks, on every rank. Collective."""
        if self.size == 1:
            return list(own)
        data = encoded(r.merge_metrics(own))
        return [decoded(self.broadcast(data, rank)) for rank in range(self.size)]

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Returns the `data` with which rank `source` called this. Collective."""
        length = torch.tensor([len(data)])
        dist.broadcast(length, group=self.group, group_src=source)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == source else None
        buffer = torch.empty(int(length), dtype=torch.uint8) if own is None else own
        dist.broadcast(buffer, group=self.group, group_src=source)
        return buffer.numpy().tobytes()


ALONE = Ranks()


def shares(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Returns the samples of each rank. Whole groups are assigned, the longest first, each to the rank with the
    fewest tokens; a rank's groups keep their order.

    Example: groups of 5, 4, 3, 3 tokens on 2 ranks are divided into 5 + 3 and 4 + 3.
    """
    if size == 1:
        return [list(samples)]
    groups = [list(g) for _, g in itertools.groupby(samples, key=lambda sample: sample.ticket)]
    tokens = [sum(sample.own_tokens for sample in group) for group in groups]
    loads, members = [0] * size, [[] for _ in range(size)]
    for i in sorted(range(len(groups)), key=lambda i: -tokens[i]):
        least = loads.index(min(loads))
        loads[least] += tokens[i]
        members[least].append(i)
    return [[sample for i in sorted(own) for sample in groups[i]] for own in members]


def reshard(model: torch.nn.Module) -> None:
    """Frees the parameters that FSDP2 gathered for a forward without backward, and would use again after an
    update."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.reshard()


def encoded(metrics: Metrics) -> bytes:
    """Returns metrics as msgpack."""

    def plain(value: Any) -> Any:
        return Array.of(value) if isinstance(value, np.ndarray) else value

    rows = [
        (key, type(m).__name__, [plain(getattr(m, name)) for name in _fields(type(m))])
        for key, m in metrics.items()
    ]
    return msgspec.msgpack.encode(rows)


def decoded(data: bytes) -> Metrics:
    """Returns the metrics that `encoded` made into msgpack."""
    found: Metrics = {}
    for key, name, values in msgspec.msgpack.decode(data, type=list[tuple[str, str, list[Any]]]):
        kind = KINDS[name]
        found[key] = kind(
            *(msgspec.convert(v, Array).numpy() if isinstance(v, list) else v for v in values)
        )
    return found


def _fields(kind: type) -> list[str]:
    return list(kind.__dataclass_fields__)
