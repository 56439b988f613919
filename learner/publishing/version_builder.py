"""Turns the learner's parameters into a version to publish: quantized, described and hashed."""

import time
import uuid
from collections.abc import Mapping

from torch import Tensor

from areal_q.config import Run
from areal_q.models import Decoder
from areal_q.models.low_bit.lora import LORA_SCALE
from areal_q.models.low_bit.published_state import published_state
from areal_q.quant.aqn import noise_of, with_noise
from areal_q.quant.code_changes import codes_moved
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.quant.sticky_scales import StickyRanges
from areal_q.weights import version as weights
from areal_q.weights.version import PayloadPool, WeightVersion


def sticky_ranges(run: Run) -> StickyRanges | None:
    """Returns empty sticky ranges, or None where scales are computed anew each time or cannot change."""
    drift = run.rollout.sticky_scales
    changes = run.rollout.format != "bf16" and not run.learner.lora
    return StickyRanges(drift) if drift and changes else None


class VersionBuilder:
    """Quantizes the model as engines will run it.

    UAQ's scaling is already in the learner's weights (learner/build.py), so nothing is folded in here.
    """

    def __init__(self, run: Run, sticky: StickyRanges | None = None, run_id: str = "") -> None:
        """`sticky` holds the ranges of the version before, from a checkpoint; None begins without any. `run_id`
        is told with each version."""
        self._run, self._run_id = run, run_id
        self._pool = PayloadPool()
        self._epoch = uuid.uuid4().hex
        self._ranges = sticky or sticky_ranges(run)
        self._last: WeightVersion | None = None
        self.codes_moved = 0.0
        """Share of the codes, 0 … 1, that differ between the last two versions built"""
        self.build_s = 0.0
        """Seconds that building the last version took"""

    def build(
        self, model: Decoder, version: int, beside: Mapping[str, Tensor] | None = None
    ) -> WeightVersion:
        """Returns version `version` of `model`, with the tensors `beside` added, such as KV scales.

        Raises QuantizationError naming a tensor that is not finite.
        """
        began = time.perf_counter()
        run, format = self._run, self._run.rollout.format
        lora = run.learner.lora
        noise = noise_of(run.rollout.aqn, version, run.seed)
        published = published_state(model, format, self._ranges)
        published = with_noise(published, noise, run.learner.uaq)
        if run.rollout.unquantized == "bf16":
            published = rest_in_bf16(published, format)
        built = weights.pack(
            published | dict(sorted((beside or {}).items())),
            run=run.name,
            epoch=self._epoch,
            version=version,
            format=format,
            uaq_scale=run.learner.uaq,
            model=model.config.to_hf(),
            published_s=time.time(),
            run_id=self._run_id,
            noise=noise,
            extra={LORA_SCALE: lora.alpha / lora.rank} if lora else None,
            pool=self._pool,
        )
        if self._last is not None:
            self.codes_moved = codes_moved(self._last.tensors, built.tensors, format)
        self._last = built
        self.build_s = time.perf_counter() - began
        return built
