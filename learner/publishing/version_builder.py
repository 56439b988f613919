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
from areal_q.quant.smoothing import SmoothingScales
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.quant.sticky_scales import StickyRanges
from areal_q.weights import version as weights
from areal_q.weights.version import PayloadPool, WeightVersion


def new_ranges(run: Run) -> StickyRanges | None:
    """Returns empty sticky ranges, or None where scales are computed anew each time or cannot change."""
    drift = run.rollout.sticky_scales
    changes = run.rollout.format != "bf16" and not run.learner.lora
    return StickyRanges(drift) if drift and changes else None


class VersionBuilder:
    """Builds versions: quantizes the model into the tensors that engines run.

    UAQ's scaling is already in the learner's weights (learner/build_policy.py) and is not applied here.
    """

    def __init__(
        self,
        run: Run,
        sticky: StickyRanges | None = None,
        run_id: str = "",
        *,
        smoothing: SmoothingScales | None = None,
        shared: bool = False,
    ) -> None:
        """`sticky` has the ranges of the version before, from a checkpoint; None begins without any.
        `smoothing` has the scales by channel of each version at the time when it is built. Each version's
        manifest names `run_id`. With `shared`, workers of this host can read the payloads."""
        self._run, self._run_id, self._smoothing = run, run_id, smoothing
        self._pool = PayloadPool(shared=shared)
        self._epoch = uuid.uuid4().hex
        self._ranges = sticky or new_ranges(run)
        self._last: WeightVersion | None = None
        self.codes_moved = 0.0
        """Share of the codes, 0 … 1, that differ between the last two versions built."""
        self.build_s = 0.0
        """Seconds that building the last version took."""

    def build(
        self,
        model: Decoder,
        version: int,
        beside: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> WeightVersion:
        """Returns version `version` of `model`, with the tensors `beside` added, such as KV scales. `state` is
        the model's state dict, where another thread may be computing with it.

        Raises QuantizationError naming a tensor that is not finite.
        """
        began = time.perf_counter()
        run, format, lora = self._run, self._run.rollout.format, self._run.learner.lora
        noise = noise_of(run.rollout.aqn, version, run.seed)
        # UAQ's scale is in the learner's weights already.
        state = with_noise(state or model.state_dict(), noise, run.learner.uaq)
        folds = self._smoothing.folds(state) if self._smoothing else None
        published = published_state(model, format, self._ranges, state, folds)
        if run.rollout.rounds_rest:
            published = rest_in_bf16(published, format)
        built = weights.pack_version(
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
