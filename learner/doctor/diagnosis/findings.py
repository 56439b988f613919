"""The rules of the doctor, one per cause: each compares a number with a threshold and words a finding with
advice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from areal_q.config import Run
from areal_q.observability.reward_signal import (
    EQUAL_STEPS,
    equal_steps,
    equal_text,
    failed_rewards,
    failed_text,
    hint,
)
from learner.doctor.diagnosis.group_checks import LogFacts, longest_run
from learner.doctor.diagnosis.token_ratios import Split, TokenTable, by_position, split_by_term

_LARGE_RMS = 0.05
"""Root mean square of log w, in nats, below which w is within about ±10 % for 95 % of the tokens, which does no
objective harm."""
_MAIN_SHARE = 0.3
"""Least share of mean(log² w) with which a term is a cause worth naming."""
_HEAVY_ESS = 0.8
"""Effective share of the samples under weights w below which the tail of w matters."""
_GROWTH = 2.0
"""Least ratio of the gap late in responses to its mean before with which the gap counts as growing."""
_ENOUGH_TOKENS = 50
_BURST_TOKENS = 4
_BURST_NATS = 3.0
"""A burst is at least _BURST_TOKENS tokens in a row whose negative log-prob exceeds the distribution's entropy
by more than _BURST_NATS each. In tokens that a policy drew from itself, about one place in e^(4·3) = 160,000
begins one."""
_MUCH_ROUTING = 0.05
"""Share of (token, layer) with other experts from which routing is worth a finding."""
_SOME_SHARE = 0.01
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
    metrics: Sequence[Mapping[str, float | None]] = ()
    """The metrics of each examined step."""


@dataclass(frozen=True)
class Finding:
    name: str
    severity: Literal["error", "warning", "note"]
    number: float
    """The number on which the finding is based; `says` names its unit."""
    says: str
    change: str


def diagnose(case: Case) -> list[Finding]:
    """Returns the findings of all rules, errors first; empty if no rule applies."""
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.severity))


def _missing_logprobs(case: Case) -> Finding | None:
    facts = case.facts
    if not facts.missing:
        return None
    return Finding(
        "missing log-probs",
        "error",
        facts.missing,
        f"{facts.missing} of {facts.tokens} behaviour log-probs are missing (first: {facts.first_bad})",
        "make the engine return the log-prob of every drawn token; such groups cannot be learnt from",
    )


def _positive_logprobs(case: Case) -> Finding | None:
    facts = case.facts
    if not facts.positive:
        return None
    return Finding(
        "positive log-probs",
        "error",
        facts.positive,
        f"{facts.positive} of {facts.tokens} behaviour log-probs are above 0 (first: {facts.first_bad})",
        "the engine returns logits or another sign: it must return log-probs of the drawn tokens",
    )


def _zero_logprobs(case: Case) -> Finding | None:
    """Reports log-probs of exactly 0, which would mean certainty: if the learner is not certain, one is
    missing."""
    x = case.tokens
    zeros = (x.behavior == 0) & (x.proximal < -0.5)
    share = zeros.sum() / max(1, len(x))
    if share < 0.001:
        return None
    return Finding(
        "zeros for log-probs",
        "error",
        float(share),
        f"{share:.1%} of the tokens have a behaviour log-prob of exactly 0 although the learner "
        f"gives them {x.proximal[zeros].mean():.2f} nats on average",
        "0.0 was written where a log-prob was missing: have the engine return it",
    )


def _padding(case: Case) -> Finding | None:
    facts = case.facts
    if not facts.after_end:
        return None
    return Finding(
        "padding counts",
        "error",
        facts.after_end,
        f"{facts.after_end} tokens behind the end of text count in the loss (first: {facts.first_bad})",
        "cut responses at the end of text, or set their loss_mask to 0 behind it",
    )


def _sampling_settings(case: Case) -> Finding | None:
    """Reports sampling settings with which rollouts draw from another distribution than the learner scores."""
    temperature = case.run.rollout.sampling.temperature
    other = {s: n for s, n in case.facts.sampling.items() if s.temperature != temperature}
    cut = {s: n for s, n in case.facts.sampling.items() if s.top_p < 1 or s.top_k or s.min_p}
    if not other and not cut:
        return None
    share = sum({**other, **cut}.values()) / max(1, case.facts.responses)
    what = [f"temperature {s.temperature:g}, the learner's is {temperature:g}" for s in other]
    what += [
        f"top_p {s.top_p:g}, top_k {s.top_k}, min_p {s.min_p:g}; the learner scores the whole vocabulary"
        for s in cut
    ]
    return Finding(
        "sampling settings",
        "error",
        share,
        f"{share:.0%} of the responses were drawn with {'; '.join(dict.fromkeys(what))}",
        "draw with rollout.sampling.temperature of the run, top_p 1.0, top_k 0 and min_p 0",
    )


def _failing_rewards(case: Case) -> Finding | None:
    failed, causes = failed_rewards(case.metrics)
    if not failed:
        return None
    learner = case.run.learner
    responses = learner.groups * learner.group_size * len(case.metrics)
    share = failed / responses
    return Finding(
        "failing rewards",
        "error" if share >= _SOME_SHARE else "warning",
        share,
        f"the reward failed for {failed_text(failed, causes, responses)}",
        "the exception stands in logs/rollout-*.log, behind `reward failed`: mend the reward, "
        "or raise reward.timeout_s",
    )


def _flat_rewards(case: Case) -> Finding | None:
    """Reports steps whose rewards are all equal, so that every advantage is 0."""
    steps = equal_steps(case.metrics)
    if not steps or steps < min(EQUAL_STEPS, len(case.metrics)):
        return None
    mean = case.metrics[-1].get("reward/mean")
    advice = hint(case.run.model, case.run.warmstart) or (
        "easier problems first, more responses a group (learner.group_size), a finer reward"
        if mean is None or mean <= 0
        else "harder problems: these are solved"
    )
    return Finding("flat rewards", "error", steps, equal_text(steps, mean), advice)


def _staleness(case: Case) -> Finding | None:
    """Reports staleness: a warning only if w leaves few samples in effect, as objectives correct for the
    rest."""
    x = _main(case, "staleness")
    if x is None:
        return None
    mean = float(case.tokens.lag.mean())
    return Finding(
        "staleness",
        "warning" if _ess(case) < _HEAVY_ESS else "note",
        x.share,
        f"staleness makes {x.share:.0%} of the gap ({x.rms:.3f} nats rms at a mean lag of {mean:.1f})",
        f"lower learner.max_lag (now {case.run.learner.max_lag}) or learner.optimizer.lr, or add workers",
    )


def _quantization(case: Case) -> Finding | None:
    parts = {x.term: x for x in _large(case) if x.term in ("weights", "activations")}
    share = sum(x.share for x in parts.values())
    if not parts or share < _MAIN_SHARE or max(x.rms for x in parts.values()) < _LARGE_RMS:
        return None
    told = ", ".join(f"{name} {x.rms:.3f}" for name, x in parts.items())
    return Finding(
        "quantization",
        "warning",
        share,
        f"quantization ({case.run.rollout.format}) makes {share:.0%} of the gap (nats rms: {told})",
        "raise learner.uaq, take rollout.format=bf16, or an objective that caps w (acr, tis, tbpo)",
    )


def _routes(case: Case) -> Finding | None:
    share = case.disagreement
    if not case.experts or (share is not None and share < _MUCH_ROUTING):
        return None
    if share is None and case.run.learner.routing_replay:
        return None
    if share is None:
        return Finding(
            "routes are not replayed",
            "note",
            0.0,
            "rollouts may have sent tokens to other experts than the learner does; nobody recorded it",
            "learner.routing_replay=true",
        )
    return Finding(
        "routes",
        "note",
        share,
        f"the learner's router would have chosen other experts on {share:.1%} of the recorded routes",
        "a finer rollout.format, or a lower learner.max_lag",
    )


def _engine(case: Case) -> Finding | None:
    x = _main(case, "engine")
    if x is None:
        return None
    return Finding(
        "engine",
        "error",
        x.share,
        f"{x.share:.0%} of the gap ({x.rms:.3f} nats rms) is neither staleness nor quantization: with the "
        "same weights, format and sampling the engine gives other log-probs than the learner's formulas",
        "compare the engine's log-probs with the reference engine's: kernels, dtype, positions, truncation",
    )


def _cache(case: Case) -> Finding | None:
    x = _main(case, "cache")
    if x is None:
        return None
    return Finding(
        "cached keys of older weights",
        "warning",
        x.share,
        f"keys and values of older weights make {x.share:.0%} of the gap ({x.rms:.3f} nats rms)",
        "rollout.engine.kv_on_update=recompute, or publish less often",
    )


def _growth(case: Case) -> Finding | None:
    bins = [b for b in by_position(case.tokens) if b[2] >= _ENOUGH_TOKENS]
    if len(bins) < 3 or bins[-1][3] < _LARGE_RMS:
        return None
    (first, last, _, late), early = bins[-1], float(np.mean([b[3] for b in bins[:-1]]))
    ratio = late / max(early, 1e-9)
    if ratio < _GROWTH:
        return None
    return Finding(
        "grows with position",
        "warning",
        ratio,
        f"the gap without staleness is {late:.3f} nats rms at tokens {first}–{last}, {early:.3f} before",
        "errors add up in the KV cache: check its dtype and positions, or shorten sampling.max_tokens",
    )


def _heavy_tail(case: Case) -> Finding | None:
    w = _weights(case)
    if not len(w) or (ess := _ess(case)) >= _HEAVY_ESS:
        return None
    return Finding(
        "heavy tail",
        "warning",
        ess,
        f"weights w leave {ess:.0%} of the samples in effect: the largest w is {w.max():.3g}, "
        f"{(w > 2).mean():.1%} of them are above 2",
        "cap w (objective acr, tis or tbpo, cap 2), and mend the largest cause above",
    )


def _repetition(case: Case) -> Finding | None:
    facts = case.facts
    share = facts.loops / max(1, facts.responses)
    if share < _SOME_SHARE:
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
    if share < _SOME_SHARE:
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


def _weights(case: Case) -> np.ndarray:
    """Returns the mismatch weights w, float64 [N]."""
    return np.exp(np.clip(case.tokens.log_w, -20, 20))


def _ess(case: Case) -> float:
    """Returns the effective share of the samples under the weights w."""
    w = _weights(case)
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))


def _large(case: Case) -> list[Split]:
    """Returns the terms of the gap, or none if the gap is too small to matter."""
    total = float(np.sqrt(np.mean(case.tokens.log_w**2))) if len(case.tokens) else 0.0
    return split_by_term(case.tokens) if total >= _LARGE_RMS else []


def _main(case: Case, term: str) -> Split | None:
    found = [x for x in _large(case) if x.term == term]
    return next((x for x in found if x.share >= _MAIN_SHARE and x.rms >= _LARGE_RMS), None)


RULES: tuple[Callable[[Case], Finding | None], ...] = (
    _failing_rewards,
    _flat_rewards,
    _missing_logprobs,
    _positive_logprobs,
    _zero_logprobs,
    _padding,
    _sampling_settings,
    _engine,
    _quantization,
    _routes,
    _staleness,
    _cache,
    _growth,
    _heavy_tail,
    _repetition,
    _garble,
)
