"""Log-probs of logged responses under any model, and the model that an engine runs, from published tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_q.config import LearnerConfig
from areal_q.models import Decoder, DecoderConfig
from areal_q.models.low_bit.lora import AdaptedLinear, adapter_of
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears
from areal_q.quant import is_quantized
from areal_q.quant.state_dict import parts_of
from learner.backends.single_device import token_logprobs
from learner.data.packing import Sample, microbatches, pack_samples


def engine_policy(
    config: DecoderConfig,
    published: Mapping[str, Tensor],
    format: str,
    device: str = "cpu",
    lora_scale: float = 0.0,
) -> Decoder:
    """Returns π_Q, the policy that an engine runs: the tensors `published` in `format`, all else in float32.

    It has no master weights and cannot be trained. Building it draws no random numbers.
    """
    model = empty_engine_policy(config, format)
    load_published(model, published, device, lora_scale)
    return model


def empty_engine_policy(config: DecoderConfig, format: str) -> Decoder:
    """Returns π_Q without tensors, for `load_published`."""
    with torch.device("meta"):
        model = Decoder(config).requires_grad_(False)
        for name, linear in linears(model).items():
            new = QuantLinear(linear.in_features, linear.out_features, linear.bias is not None)
            new.format = format
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.requires_grad_(False))
    return model


def load_published(
    model: Decoder, published: Mapping[str, Tensor], device: str = "cpu", lora_scale: float = 0.0
) -> None:
    """Makes `model`, which is `empty_engine_policy` or has other tensors, the policy that engines run with the
    tensors `published`."""
    for name, linear in linears(model).items():
        assert isinstance(linear, QuantLinear)
        parts = parts_of(published, name, linear.format)
        linear.take({k: t.to(device) for k, t in parts.items()})
        if adapter := adapter_of(published, name):
            pair = adapter[0].to(device), adapter[1].to(device)
            linear.product = AdaptedLinear(linear.product, [pair], [len(pair[1])], lora_scale)
    names = [name for name in model.state_dict() if not is_quantized(name)]
    rest = {name: published[name].to(device).float() for name in names}
    model.load_state_dict(rest, strict=False, assign=True)
    model.requires_grad_(False)


@dataclass(frozen=True)
class Scorer:
    """Computes log-probs and entropies, float64 [N] nats each, of the N response tokens of samples under any
    model."""

    cfg: LearnerConfig

    @torch.no_grad()
    def __call__(
        self, model: Decoder, samples: Sequence[Sample], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        cuts = microbatches(samples, self.cfg.microbatch_tokens)
        replay = self.cfg.routing_replay
        parts = [
            token_logprobs(model, pack_samples(cut, self.cfg.device), temperature, replay)
            for cut in cuts
        ]
        logprobs, entropy = (torch.cat(x).double().cpu().numpy() for x in zip(*parts, strict=True))
        return logprobs, entropy
