"""Rules about responses that make no sense: endless repetition, and bursts of improbable tokens."""

import numpy as np

from learner.doctor.diagnosis.findings import SOME_SHARE, Case, Finding, Rule
from learner.doctor.diagnosis.group_checks import longest_run

_BURST_TOKENS = 4
_BURST_NATS = 3.0
"""A burst is at least _BURST_TOKENS tokens in a row whose negative log-prob exceeds the distribution's entropy
by more than _BURST_NATS each. In tokens that a policy drew from itself, about one place in e^(4·3) = 160,000
begins one."""


def _repetition(case: Case) -> Finding | None:
    facts = case.facts
    share = facts.loops / max(1, facts.responses)
    if share < SOME_SHARE:
        return None
    return Finding(
        "repetition",
        "warning",
        share,
        f"{share:.1%} of the responses repeat themselves in a loop; {facts.negative_loops} of these "
        f"{facts.loops} are negative samples",
        "error tokens in negative samples: objective tbpo bounds them from both sides (QaRL)",
    )


def _garble(case: Case) -> Finding | None:
    """Reports responses with bursts of tokens that are highly improbable to the learner."""
    x = case.tokens
    if not len(x):
        return None
    absurd = -x.proximal - x.entropy > _BURST_NATS
    starts = np.flatnonzero(np.diff(x.response, prepend=-1))
    rows = list(zip(starts, np.append(starts[1:], len(x)), strict=True))
    bursts = [(a, b) for a, b in rows if longest_run(absurd[a:b]) >= _BURST_TOKENS]
    share = len(bursts) / max(1, len(rows))
    if share < SOME_SHARE:
        return None
    negative = sum(bool(x.advantage[a] < 0) for a, _ in bursts)
    return Finding(
        "garble",
        "warning",
        share,
        f"{share:.1%} of the responses hold a burst of at least {_BURST_TOKENS} tokens that the learner "
        f"finds {_BURST_NATS:g} nats less probable than usual; {negative} of "
        f"these {len(bursts)} are negative samples",
        "accumulated quantization error: finer rollout.format, lower temperature, objective tbpo",
    )


TEXT_RULES: tuple[Rule, ...] = (_repetition, _garble)
