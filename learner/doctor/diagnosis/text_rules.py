"""Rules about responses from which little is learnt: none is right, many are cut off, repeat themselves without
end, or hold bursts of improbable tokens."""

import numpy as np

from learner.doctor.diagnosis.findings import SOME_SHARE, Case, Finding, Rule
from learner.doctor.diagnosis.group_checks import longest_run

_ENOUGH_RESPONSES = 16
_CUT_OFF = 0.25
"""Share of responses without their end, none of them right, from which that is the likely cause. Chosen."""
_BURST_TOKENS = 4
_BURST_NATS = 3.0
"""A burst is at least _BURST_TOKENS tokens in a row whose negative log-prob exceeds the distribution's entropy
by more than _BURST_NATS each. In tokens that a policy drew from itself, about one place in e^(4·3) = 160,000
begins one."""


def _none_right(case: Case) -> Finding | None:
    """Reports that no response was right. That may be early in a run; with many that were cut off before their
    end it has a cause."""
    facts = case.facts
    if facts.right or facts.scored < _ENOUGH_RESPONSES or case.run.learner.teacher:
        return None
    share = facts.cut_off / facts.scored
    said = f"none of {facts.scored} responses was right"
    if share < _CUT_OFF:
        change = "easier problems, or more responses a group: areal-q report shows what they say"
        return Finding("no right answer yet", "note", facts.scored, said, change)
    longer = f"a larger rollout.sampling.max_tokens (now {case.run.rollout.sampling.max_tokens})"
    return Finding(
        "cut off",
        "warning",
        share,
        f"{said} yet, and {share:.0%} of them were cut off",
        f"{longer}, or a prompt that asks for short answers",
    )


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


TEXT_RULES: tuple[Rule, ...] = (_none_right, _repetition, _garble)
