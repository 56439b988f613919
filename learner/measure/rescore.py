"""Log-probs of logged responses under any model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_q.config import LearnerConfig
from areal_q.models import Decoder
from learner.backends.single_device import token_logprobs
from learner.data.packing import Sample, microbatches, pack_samples, paths_of


@dataclass(frozen=True)
class Scorer:
    """Computes log-probs and entropies, float64 [N] nats each, of the N response tokens of samples under any
    model."""

    cfg: LearnerConfig

    @torch.no_grad()
    def __call__(
        self, model: Decoder, samples: Sequence[Sample], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        cuts = microbatches(samples, self.cfg.microbatch_tokens, paths_of(model.config))
        replay = self.cfg.routing_replay
        parts = [
            token_logprobs(model, pack_samples(cut, self.cfg.device), temperature, replay)
            for cut in cuts
        ]
        logprobs, entropy = (torch.cat(x).double().cpu().numpy() for x in zip(*parts, strict=True))
        return logprobs, entropy
