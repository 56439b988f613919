"""The precision in which the learner computes: full, or the rollouts' number format
(areal_q/models/low_bit/quantized_forward.py)."""

from areal_q.config import Run
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


def set_precision(model: Decoder, run: Run) -> None:
    """Replaces the linears of `model` by those of the run's precision, with the same parameters; or, with LoRA,
    by frozen ones with adapters. If they compute as in rollouts, all other layers do so too."""
    format, rounds_rest = run.rollout.format, run.rollout.rounds_rest
    if run.learner.lora:
        if not adapted(model):
            adapt(model, format, run.learner.lora, run.seed)
        if rounds_rest:
            round_frozen(model)
        return
    kind = LINEARS[run.learner.precision]
    if any(type(linear) is not kind for linear in linears(model).values()):
        use(kind, model, format)
    round_rest(model, rounds_rest and kind is not Linear)
