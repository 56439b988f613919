"""The precision in which the learner computes: full, or the rollouts' number format
(areal_q/models/low_bit/quantized_forward.py)."""

from typing import NamedTuple, Self

from areal_q.config import Lora, Run
from areal_q.config.learner import Precision
from areal_q.config.run import FormatName
from areal_q.models import Decoder
from areal_q.models.layers.linear import Linear
from areal_q.models.low_bit.bf16_rounding import round_frozen, round_rest
from areal_q.models.low_bit.fp8_training import Fp8TrainingLinear
from areal_q.models.low_bit.lora import adapt, adapted
from areal_q.models.low_bit.quantized_forward import QuantLinear, linears, use

LINEARS: dict[str, type[Linear]] = {
    "full": Linear,
    "qarl": QuantLinear,
    "jet": Fp8TrainingLinear,
}


class PrecisionSettings(NamedTuple):
    """The settings that determine what numbers a model computes with."""

    precision: Precision
    """Forward and backward in full precision, or on the rollouts' numbers."""
    lora: Lora | None
    """Adapters on a frozen base; None where all weights are trained."""
    format: FormatName
    """Number format of the rollouts."""
    rounds_rest: bool
    """True if the rollouts' other weights are rounded to bfloat16."""
    seed: int
    """Seed of the run, from which the adapters begin."""

    @classmethod
    def of(cls, run: Run) -> Self:
        """Returns these settings of `run`."""
        cfg, rollout = run.learner, run.rollout
        rounds_rest = rollout.unquantized == "bf16"
        return cls(cfg.precision, cfg.lora, rollout.format, rounds_rest, run.seed)


def set_precision(model: Decoder, settings: PrecisionSettings) -> None:
    """Replaces the linears of `model` by those of its precision, with the same parameters; or, with LoRA, by
    frozen ones with adapters. If they compute as in rollouts, all other layers do so too."""
    if settings.lora:
        if not adapted(model):
            adapt(model, settings.format, settings.lora, settings.seed)
        if settings.rounds_rest:
            round_frozen(model)
        return
    kind = LINEARS[settings.precision]
    if any(type(linear) is not kind for linear in linears(model).values()):
        use(kind, model, settings.format)
    round_rest(model, settings.rounds_rest and kind is not Linear)
