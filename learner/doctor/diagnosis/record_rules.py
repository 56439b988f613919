"""Rules about what a run recorded, whatever its model computes: log-probs, padding, settings."""

from learner.doctor.diagnosis.findings import Case, Finding, Rule


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
    """Reports a temperature with which rollouts draw from another distribution than the learner scores."""
    temperature = case.run.rollout.sampling.temperature
    other = {s: n for s, n in case.facts.sampling.items() if s.temperature != temperature}
    if not other:
        return None
    share = sum(other.values()) / max(1, case.facts.responses)
    what = [f"temperature {s.temperature:g}, the learner's is {temperature:g}" for s in other]
    return Finding(
        "sampling settings",
        "error",
        share,
        f"{share:.0%} of the responses were drawn with {'; '.join(dict.fromkeys(what))}",
        "draw with rollout.sampling.temperature of the run",
    )


RECORD_RULES: tuple[Rule, ...] = (
    _missing_logprobs,
    _positive_logprobs,
    _zero_logprobs,
    _padding,
    _sampling_settings,
)
