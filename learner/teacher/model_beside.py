"""A teacher that the learner itself holds: a frozen model of any size and family, also a quantized one."""

from collections.abc import Sequence

import numpy as np
import torch

from areal_q.config import LearnerConfig
from areal_q.messages import Group
from areal_q.models import Decoder
from learner.backends.single_device import token_logprobs
from learner.data.packing import microbatches, pack_samples, unlearnt_samples
from learner.teacher.scoring import with_logprobs


class ModelBeside:
    """Scores with `model`, packed as the learner's own forward pass is, and at the rollouts' temperature."""

    def __init__(self, model: Decoder, cfg: LearnerConfig, temperature: float) -> None:
        self._model = model.to(cfg.device).requires_grad_(False)
        self._model.dtype = getattr(torch, cfg.products)
        self._cfg, self._temperature = cfg, temperature

    @torch.no_grad()
    def scored(self, groups: Sequence[Group]) -> list[Group]:
        samples = unlearnt_samples(groups)
        found: list[np.ndarray] = []
        for cut in microbatches(samples, self._cfg.microbatch_tokens):
            batch = pack_samples(cut, self._cfg.device)
            logprobs = token_logprobs(self._model, batch, self._temperature)[0].cpu().numpy()
            ends = np.cumsum([sample.trajectory.num_tokens for sample in cut])
            found += np.split(logprobs, ends[:-1])
        return with_logprobs(groups, found)
