"""The sources of a format's error and noise: which linears, and which tokens' activations."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from areal_q.config import Smoothing
from areal_q.models.low_bit.quantized_forward import linears
from rollout.evaluation.format_error import Error, Reference, quantize_only


class PartError(Struct, frozen=True):
    """The error of a model of which only some linears are in the format."""

    name: str
    """A kind of linear such as `down_proj`, or a layer such as `layer 3`"""
    error: Error


class Outlier(Struct, frozen=True):
    """A token whose activations are far larger than others' before the same linear."""

    position: int
    """In its text, from 0"""
    token: int
    linear: str
    largest: float
    """The largest magnitude in its row of inputs"""
    usual: float
    """The median of the rows' largest magnitudes"""


def parts(
    reference: Reference, format: str, smoothing: Smoothing | None = None
) -> Iterator[PartError]:
    """Yields the error of each kind of linear alone in the format, then of each layer alone, smoothed if there
    are settings for it."""
    folds = reference.folds(format, smoothing)
    policy = reference.policy(reference.published(format, folds), format)
    members: dict[str, list[str]] = defaultdict(list)
    layers: dict[str, list[str]] = defaultdict(list)
    for name in linears(policy):
        members[name.rpartition(".")[2]].append(name)
        layers[f"layer {name.partition('layers.')[2].partition('.')[0]}"].append(name)
    for part, names in {**members, **layers}.items():
        quantize_only(policy, reference.model, names, folds)
        yield PartError(part, reference.error_of(policy))


@torch.no_grad()
def outliers(reference: Reference, count: int = 5) -> list[Outlier]:
    """Returns the tokens with the largest inputs of linears, beside what is usual there, at most one entry for
    each position of a text, the largest ratio first."""
    found: dict[tuple[int, int], Outlier] = {}
    positions, ids = reference.layout.positions.tolist(), reference.ids.tolist()

    def look(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2).abs().amax(-1)
        if len(rows) != len(ids):  # experts see only some tokens
            return
        usual = float(rows.median())
        for place in rows.topk(min(count, len(rows))).indices.tolist():
            key, large = (positions[place], ids[place]), float(rows[place])
            best = found.get(key)
            if best is None or large * best.usual > best.largest * usual:
                found[key] = Outlier(*key, name, large, usual)

    def hook(name: str) -> Any:
        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            look(name, inputs[0])

        return before

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in linears(reference.model).items()]
    try:
        reference.model(reference.ids, reference.layout)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(found.values(), key=lambda o: -o.largest / max(o.usual, 1e-30))[:count]
