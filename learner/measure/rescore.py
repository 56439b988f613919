"""Log-probs of logged responses under any model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_q.config import LearnerConfig
from areal_q.models import Decoder
from learner.backends.single_device import token_logprobs
from learner.data.packing import PATHS, Sample, microbatches, pack_samples


@dataclass(frozen=True)
class Scorer:
    """Computes log-probs and entropies, float64 [N] nats each, of the N response tokens of samples under any
    model."""

    cfg: LearnerConfig

    @torch.no_grad()
    def __call__(
        self, model: Decoder, samples: Sequence[Sample], temperature: float
    ) -> tuple[np.ndarray, np.ndarray]:
        paths = PATHS if model.config.foreign is None else 1
        cuts = microbatches(samples, self.cfg.microbatch_tokens, paths)
        replay = self.cfg.routing_replay
        parts = [
            token_logprobs(model, pack_samples(cut, self.cfg.device), temperature, replay)
            for cut in cuts
        ]
        logprobs, entropy = (torch.cat(x).double().cpu().numpy() for x in zip(*parts, strict=True))
        return logprobs, entropy
