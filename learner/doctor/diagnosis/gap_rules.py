"""Rules about the gap between behaviour and learner: which of its terms is the cause, and how it spreads."""

import numpy as np

from areal_q.checks.format_advice import instead, learnt_with, name_of
from areal_q.config import PretrainedModel, Run
from learner.doctor.diagnosis.findings import Case, Finding, Rule
from learner.doctor.diagnosis.token_ratios import GapTerm, by_position, split_by_term

_LARGE_RMS = 0.05
"""Root mean square of log w, in nats, below which w is within about ±10 % for 95 % of the tokens, which does no
objective harm."""
_MAIN_SHARE = 0.3
"""Least share of mean(log² w) with which a term is a cause worth naming."""
_HEAVY_ESS = 0.8
"""Effective share of the samples under weights w below which the tail of w matters."""
_NOISE_MARGIN = 1.5
"""How far a faithful engine's gap may exceed the noise, both rms. Their means, on 96 tokens of SmolLM2-135M in
int8, are within 1.3 of each other for passes that differ by rounding alone."""
_GROWTH = 2.0
"""Least ratio of the gap late in responses to its mean before with which the gap counts as growing."""
_ENOUGH_TOKENS = 50
_MUCH_ROUTING = 0.05
"""Share of (token, layer) with other experts from which routing is worth a finding."""


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
        ", or ".join(_better(case.run, "an objective that caps w (acr, tis, tbpo)"))
        + _known(case.run),
    )


def _better(run: Run, otherwise: str) -> list[str]:
    return [*filter(None, [instead(run)]), otherwise]


def _known(run: Run) -> str:
    """Returns what a pretrained model learnt with the format of `run`, to be appended; "" for a small one."""
    known = learnt_with(name_of(run)) if isinstance(run.model, PretrainedModel) else ""
    return f"; {known}" if known else ""


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
    if x.rms <= _NOISE_MARGIN * case.noise_rms:
        return Finding(
            "rounding noise",
            "warning",
            x.share,
            f"{x.share:.0%} of the gap ({x.rms:.3f} nats rms) is noise: activations in "
            f"{case.run.rollout.format} turn float32's own rounding into {case.noise_rms:.3f} nats rms on this "
            "model, which no kernel and no alignment removes",
            "; ".join(_better(case.run, "areal-q formats RUN measures what each leaves"))
            + _known(case.run),
        )
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


def _weights(case: Case) -> np.ndarray:
    """Returns the mismatch weights w, float64 [N]."""
    return np.exp(np.clip(case.tokens.log_w, -20, 20))


def _ess(case: Case) -> float:
    """Returns the effective share of the samples under the weights w."""
    w = _weights(case)
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))


def _large(case: Case) -> list[GapTerm]:
    """Returns the terms of the gap, or none if the gap is too small to matter."""
    total = float(np.sqrt(np.mean(case.tokens.log_w**2))) if len(case.tokens) else 0.0
    return split_by_term(case.tokens) if total >= _LARGE_RMS else []


def _main(case: Case, term: str) -> GapTerm | None:
    found = [x for x in _large(case) if x.term == term]
    return next((x for x in found if x.share >= _MAIN_SHARE and x.rms >= _LARGE_RMS), None)


GAP_RULES: tuple[Rule, ...] = (
    _engine,
    _quantization,
    _routes,
    _staleness,
    _cache,
    _growth,
    _heavy_tail,
)
