"""Which numbers the learner computes with: full precision, or those of rollouts (areal_q/models/aligned.py)."""

from areal_q.config import Run
from areal_q.models import Decoder
from areal_q.models.aligned import QuantLinear, linears, use
from areal_q.models.linear import Linear

LINEARS: dict[str, type[Linear]] = {"full": Linear, "qarl": QuantLinear}


def set_precision(model: Decoder, run: Run) -> None:
    """Makes the linears of `model` those of `learner.precision`; its parameters stay as they are."""
    kind = LINEARS[run.learner.precision]
    if any(type(linear) is not kind for linear in linears(model).values()):
        use(kind, model, run.rollout.format)
