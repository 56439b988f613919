"""Scales by channel and clipped ranges for weights alone in four bits (AWQ, arXiv 2306.00978).

The error of a weight counts by what it is multiplied with. With the mean squares of a linear's inputs,

    error = Σ_oj (Ŵ_oj − W_oj)² · E[x_j²]

Of two things the choice with the least error is taken, for the linears that read one writer (rescaling.py):

    scales     s_j = (E|x_j|)^α, α of ALPHAS: what counts more loses less
    clips      of CLIPS, for each group: the share of its largest magnitude that its scale covers

As in smoothing.py every s is a power of two, so that the model computes the same to the bit before it is
rounded, and the learner's own weights stay as they are. Both are chosen once, before the first version, from
the activations of prompts, and are part of a checkpoint: a step of RL moves weights by far less than a group's
range, and other clips would change most codes, and with them a delta.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from areal_q.config import Smoothing
from areal_q.config.run import WEIGHT_SCALES
from areal_q.quant.format import Ranges, blocked
from areal_q.quant.formats.int4 import Int4
from areal_q.quant.linears import is_quantized
from areal_q.quant.registry import FORMATS
from areal_q.quant.rescaling import Fold, Pair, by_channel, by_column, channels_of, pairs_of
from areal_q.quant.smoothing import Pairs, SmoothingScales, wanted_log2

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_CLIP = ".clip"
"""What follows a weight's name in a checkpoint"""


def scales_for(
    format: str, cfg: Smoothing, head_dim: int, pairs: Pairs = pairs_of
) -> SmoothingScales:
    """Returns scales for `format`, to be chosen: AWQ's for one of WEIGHT_SCALES, else SmoothQuant's."""
    if format in WEIGHT_SCALES:
        return AwqScales(cfg, head_dim, format, pairs)
    return SmoothingScales(cfg, head_dim, pairs)


class AwqScales(SmoothingScales):
    """The scales and clips in use."""

    def __init__(self, cfg: Smoothing, head_dim: int, format: str, pairs: Pairs) -> None:
        super().__init__(cfg, head_dim, pairs)
        found = FORMATS[format]
        assert isinstance(found, Int4)
        self._format = found
        self._clips: dict[str, Tensor] = {}

    def due(self, step: int) -> bool:
        return False

    @staticmethod
    def measure(inputs: Tensor) -> Tensor:
        """Returns the mean magnitude and the mean square of each channel of `inputs` [T, in], [2, in]."""
        return torch.stack([inputs.abs().mean(0), inputs.square().mean(0)])

    @torch.no_grad()
    def update(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Chooses scales and clips for the weights `state`, whose linears have such `inputs`, [2, in] by the
        name of the weight, as `measure` returns them."""
        self._folds = None
        for pair in self._pairs(state):
            self._scales[pair.writer] = self._scale(pair, state, inputs)
        for name, fold in super().folds(state).items():
            if is_quantized(name):
                scaled = fold.of(state[name])
                counts = inputs[name][1] / (1.0 if fold.columns is None else fold.columns.square())
                self._clips[name] = _clips(self._format, scaled, counts)
        self._folds = None

    def folds(self, state: Mapping[str, Tensor]) -> Mapping[str, Fold]:
        if self._folds is None:
            scaled = super().folds(state)
            self._folds = {n: replace(f, clip=self._clips.get(n)) for n, f in scaled.items()}
        return self._folds

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {f"{name}{_CLIP}": clip for name, clip in self._clips.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        clips = {name: t for name, t in tensors.items() if name.endswith(_CLIP)}
        super().restore({name: t for name, t in tensors.items() if name not in clips})
        self._clips = {name.removesuffix(_CLIP): t for name, t in clips.items()}

    def _scale(
        self, pair: Pair, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> Tensor:
        mean = torch.stack([inputs[name][0] for name in pair.readers]).amax(0)
        mean = by_channel(mean, channels_of(pair, state), self._head_dim)
        found = []
        for alpha in ALPHAS:
            s = wanted_log2(mean, torch.ones_like(mean), alpha).round().exp2()
            error = torch.zeros(())
            for name in filter(is_quantized, pair.readers):
                columns = by_column(s, state[name].shape[1], self._head_dim)
                scaled = Fold(columns=columns).of(state[name])
                rounded = self._format.dequantize(self._format.quantize(scaled, name))
                error += (
                    ((rounded - scaled).square() @ (inputs[name][1] / columns.square())).sum().cpu()
                )
            found.append((float(error), s))
        return min(found, key=lambda pair: pair[0])[1]


def _clips(format: Int4, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns the best of CLIPS for each group of `weight` [out, in], whose columns' errors count as much as
    `counts` [in] say."""
    measured = format.ranges(weight)
    best, chosen = torch.full_like(measured.blocks, torch.inf), torch.ones_like(measured.blocks)
    for clip in CLIPS:
        ranges = Ranges(measured.blocks * clip, measured.whole)
        rounded = format.dequantize(format.quantize(weight, "", ranges))
        error = blocked((rounded - weight).square() * counts, format.group).sum(2)
        chosen = torch.where(error < best, clip, chosen)
        best = torch.minimum(best, error)
    return chosen
