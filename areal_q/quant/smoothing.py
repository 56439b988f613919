"""Smoothing: activations' outliers move into the weights of what is published (SmoothQuant, arXiv 2211.10438).

A format that rounds activations gives the numbers of a token one scale, or those of a group of channels. A few
channels of a pretrained model are hundreds of times larger than the others, which then round to little or
nothing. With one scale s for each channel j between a writer and its readers (rescaling.py),

    x_j ← x_j / s_j,    W_:j ← W_:j · s_j,    s_j = max|x_j|^α / max|W_:j|^(1-α)    divided by the median of s

the function stays the same, and the difficulty is shared between activations and weights. Every s is rounded
to a power of two: multiplying by one is exact, so that in float32 and in bfloat16 the published weights
compute bit for bit what the learner's do, and a norm that was bfloat16 is so still. s stays where it is until
the wanted one is more than a factor of 4 away, so that deltas from version to version stay small.

In a model that transformers computes, each linear has an s of its own, and divides its input by it as engines
run it: s is published beside the weight, float32 [in], as `X.smoothing` for `X.weight`.

The learner's own weights stay as they are: its optimizer, checkpoints and exports know nothing of s. What is
published depends on the s in use, and they are part of a checkpoint, like sticky scales.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from areal_q.config import Smoothing
from areal_q.quant.linears import is_quantized
from areal_q.quant.rescaling import Fold, Pair, by_channel, channels_of, folds_of, pairs_of

_MOST = 10.0
"""Largest |log2 s|: a channel that is nearly always 0 must not scale its weights without bound."""
_DRIFT = 2.0
"""Distance of log2 s from the wanted one within which it stays. Maxima of a few hundred tokens differ by a
factor of 2 from batch to batch in one channel of seventy, and a scale that changes is sent with all that it
scales."""


def wanted_log2(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Returns log2 s, not rounded, of the channels whose largest magnitudes are `inputs` and, in the columns
    that read them, `weights`, float32 [channels] both. A channel that is 0 throughout has s = 1."""
    log2 = alpha * inputs.log2() - (1 - alpha) * weights.log2()
    log2 = torch.where(log2.isfinite(), log2, torch.nan)
    return (log2 - log2.nanmedian()).nan_to_num(0.0).clamp(-_MOST, _MOST)


Pairs = Callable[[Iterable[str]], list[Pair]]


class SmoothingScales:
    """The scales in use, one for each channel of each writer."""

    def __init__(self, cfg: Smoothing, head_dim: int, pairs: Pairs = pairs_of) -> None:
        """`pairs` is `inputs_of` for a model that transformers computes."""
        self.cfg, self._head_dim, self._pairs = cfg, head_dim, pairs
        self._scales: dict[str, Tensor] = {}
        self._folds: dict[str, Fold] | None = None

    def due(self, step: int) -> bool:
        """Returns True if the scales are to be measured after step `step`."""
        return bool(self.cfg.every) and (step + 1) % self.cfg.every == 0

    @staticmethod
    def measure(inputs: Tensor) -> Tensor:
        """Returns the largest magnitude of each channel of `inputs` [T, in], [in]."""
        return inputs.abs().amax(0)

    @torch.no_grad()
    def update(self, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Chooses scales for the weights `state`, whose linears have inputs of the largest magnitudes `inputs`,
        float32 [in] by the name of the weight. Scales that are good enough stay as they are."""
        self._folds = None
        for pair in self._pairs(state):
            wanted = wanted_log2(*self._largest(pair, state, inputs), self.cfg.alpha)
            used = self._scales.get(pair.writer)
            new = wanted.round().exp2()
            if used is not None:
                new = torch.where((wanted - used.log2()).abs() <= _DRIFT, used, new)
            self._scales[pair.writer] = new

    def folds(self, state: Mapping[str, Tensor]) -> Mapping[str, Fold]:
        """Returns what the parameters `state` are multiplied by, by name; nothing without any scales."""
        if self._folds is None:
            pairs = self._pairs(state) if self._scales else []
            self._folds = folds_of(pairs, state, self._scales, self._head_dim)
        return self._folds

    def tensors(self) -> dict[str, Tensor]:
        """Returns the scales in use, float32 [channels], by the writer's name."""
        return dict(self._scales)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on with scales that `tensors` gave."""
        self._scales, self._folds = dict(tensors), None

    def _largest(
        self, pair: Pair, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the largest magnitudes of the channels of `pair`, and of the quantized weights' columns that
        read them."""
        channels = channels_of(pair, state)
        seen = torch.stack([inputs[name] for name in pair.readers]).amax(0)
        columns = [state[n].abs().amax(0).float() for n in pair.readers if is_quantized(n)]
        both = seen, torch.stack(columns).amax(0)
        return (
            by_channel(both[0], channels, self._head_dim),
            by_channel(both[1], channels, self._head_dim),
        )
