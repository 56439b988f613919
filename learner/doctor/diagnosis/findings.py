"""The input of the doctor's rules, and the findings that they return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from areal_q.config import Run
from areal_q.observability.learning_faults import Fault
from learner.doctor.diagnosis.group_checks import LogFacts
from learner.doctor.diagnosis.token_ratios import TokenTable

SOME_SHARE = 0.01
"""Share of the responses from which a fault in them is worth a finding."""


@dataclass(frozen=True)
class Case:
    """The input of all rules."""

    run: Run
    facts: LogFacts
    tokens: TokenTable
    disagreement: float | None = None
    """Share of (token, layer) for which the learner's router would have chosen other experts; None if no routes
    were recorded."""
    experts: bool = False
    """True if the model has experts."""
    faults: Sequence[Fault] = ()
    """Why the whole run does not learn, causes first."""
    noise_rms: float = 0.0
    """How far float32's own rounding moves the log-probs of π_Q, in nats, root mean square
    (areal_q/models/low_bit/engine_policy.py)."""


@dataclass(frozen=True)
class Finding:
    name: str
    severity: Literal["error", "warning", "note"]
    number: float
    """The number on which the finding is based; `says` names its unit."""
    says: str
    change: str


Rule = Callable[[Case], Finding | None]
"""A rule for one cause: it compares a number with a threshold and words a finding with advice."""
