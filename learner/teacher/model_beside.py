"""A teacher that the learner itself holds: a frozen model of any size and family, also a quantized one."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from areal_q.config import LearnerConfig
from areal_q.errors import ConfigError
from areal_q.messages import Group
from areal_q.models import Decoder
from learner.data.packing import unlearnt_samples
from learner.measure.rescore import Scorer
from learner.teacher.scoring import with_logprobs


class ModelBeside:
    """Scores with `model`, packed as the learner's own forward pass is, and at the rollouts' temperature."""

    def __init__(self, model: Decoder, cfg: LearnerConfig, temperature: float) -> None:
        self._model = model.to(cfg.device).requires_grad_(False)
        self._model.dtype = getattr(torch, cfg.products)
        self._temperature = temperature
        # Its experts are others than those that the rollout's tokens went to.
        self._score = Scorer(msgspec.structs.replace(cfg, routing_replay=False))

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        samples = unlearnt_samples(groups)
        longest, most = max(s.num_tokens for s in samples), self._model.config.max_positions
        if longest > most:  # of an agent, whose messages have no bound but the student's positions
            raise ConfigError(
                f"learner.teacher.path: {longest} tokens do not fit into the teacher's {most} positions"
            )
        logprobs, _ = self._score(self._model, samples, self._temperature)
        ends = np.cumsum([sample.trajectory.num_tokens for sample in samples])
        return with_logprobs(groups, np.split(logprobs, ends[:-1]))
