"""How far a number format moves a model's log-probs, and how much of it is noise, on given texts.

The model in full precision is our own decoder in float32; the format runs as in rollouts, on our own quantized
linears (areal_q/models/low_bit/engine_policy.py). Only tokens of answers are compared. p is the model's
distribution of a token, q the format's:

    error = |log q(token) − log p(token)|
    KL    = Σ_v q(v) · log (q(v) / p(v)) over the vocabulary: rollouts draw from q
    k3    = r − 1 − log r with r = q(token) / p(token): the estimate of KL(p‖q) from the tokens alone
    top-1 = whether the likeliest tokens agree
    noise = |log q′(token) − log q(token)|, q′ of a pass that differs by float32's rounding (`perturbed`)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from areal_q.config import Smoothing
from areal_q.linear.quantized_linear import FloatLinear
from areal_q.models import Decoder, PackedLayout
from areal_q.models.low_bit.engine_policy import engine_policy, perturbed
from areal_q.models.low_bit.quantized_forward import QuantLinear, Unfolded, linears
from areal_q.models.smoothed_state import first_folds
from areal_q.quant import quantize_state
from areal_q.quant.rescaling import Fold

ROWS = 256
"""Tokens whose distributions over the vocabulary are in memory at once"""


@dataclass(frozen=True)
class AnsweredText:
    """Token ids of a prompt and its answer, of which the first `prompt` are the prompt's."""

    ids: list[int]
    prompt: int


class Error(Struct, frozen=True, kw_only=True):
    """Means over the answers' tokens, in nats a token, and the largest of them."""

    error_mean: float
    error_max: float
    kl: float
    k3: float
    top1: float
    """Share of the tokens on whose likeliest successor both agree"""
    noise_mean: float
    noise_max: float


class Reference:
    """A model in full precision on some texts, to compare formats with."""

    def __init__(self, model: Decoder, texts: Sequence[AnsweredText]) -> None:
        self.model = model
        self.prompts = [text.ids[: text.prompt] for text in texts]
        self.ids = torch.tensor([i for text in texts for i in text.ids])
        self.layout = PackedLayout.of([len(text.ids) for text in texts])
        begins = torch.tensor([0, *(len(text.ids) for text in texts)]).cumsum(0).tolist()
        spans = [
            torch.arange(b + t.prompt, b + len(t.ids)) for b, t in zip(begins, texts, strict=False)
        ]
        self._targets = torch.cat(spans)
        """Places of the answers' tokens, int64 [N]; the hidden state before each predicts it."""
        self._hidden = self._states(model)

    def folds(self, format: str, smoothing: Smoothing | None) -> Mapping[str, Fold]:
        """Returns what a learner's first version multiplies parameters by: smoothing's scales, from the
        prompts, if there are settings for it."""
        return first_folds(self.model, self.prompts, smoothing, format) if smoothing else {}

    def published(self, format: str, folds: Mapping[str, Fold] | None = None) -> dict[str, Tensor]:
        """Returns the tensors that a learner publishes as its first version, with `folds`. Raises
        QuantizationError, which names the tensor."""
        return quantize_state(self.model.state_dict(), format, folds=folds)

    def error_of(self, policy: Decoder) -> Error:
        """Measures a policy with linears in a format, by one pass and a perturbed one."""
        quiet = self._states(policy)
        with perturbed(policy):
            noisy = self._states(policy)
        cuts = [slice(i, i + ROWS) for i in range(0, len(self._targets), ROWS)]
        rows = [self._compare(policy, quiet[i], noisy[i], i) for i in cuts]
        error, noise, kl, k3, same = (torch.cat(column) for column in zip(*rows, strict=True))
        return Error(
            error_mean=float(error.mean()),
            error_max=float(error.max()),
            kl=float(kl.mean()),
            k3=float(k3.mean()),
            top1=float(same.mean()),
            noise_mean=float(noise.mean()),
            noise_max=float(noise.max()),
        )

    def policy(self, published: Mapping[str, Tensor], format: str) -> Decoder:
        return engine_policy(self.model.config, published, format)

    def _compare(
        self, policy: Decoder, quiet: Tensor, noisy: Tensor, rows: slice
    ) -> tuple[Tensor, ...]:
        """Returns |error|, |noise|, KL, k3 and whether the likeliest agree, float64 [R] each."""
        p = self.model.logits(self._hidden[rows]).double().log_softmax(-1)
        q = policy.logits(quiet).double().log_softmax(-1)
        q_noisy = policy.logits(noisy).double().log_softmax(-1)
        token = self.ids[self._targets[rows], None]
        log_r = (q - p).gather(1, token)[:, 0]
        noise = (q_noisy - q).gather(1, token)[:, 0]
        kl = (q.exp() * (q - p)).sum(-1)
        same = (q.argmax(-1) == p.argmax(-1)).double()
        return log_r.abs(), noise.abs(), kl, log_r.expm1() - log_r, same

    @torch.no_grad()
    def _states(self, model: Decoder) -> Tensor:
        return model(self.ids, self.layout)[self._targets - 1]


def quantize_only(
    policy: Decoder, model: Decoder, chosen: Iterable[str], folds: Mapping[str, Fold]
) -> None:
    """Gives the linears of `policy` other than those named in `chosen` the weights of `model` in float32, times
    `folds`, with which `policy` was published."""
    kept, weights = {*chosen}, model.state_dict()
    for name, linear in linears(policy).items():
        assert isinstance(linear, QuantLinear)
        if name in kept:
            linear.take(linear.parts)
        else:
            weight = f"{name}.weight"
            fold = folds.get(weight, Fold())
            product = FloatLinear(fold.of(weights[weight]))
            linear.product = Unfolded(product, fold) if fold.at_input else product
