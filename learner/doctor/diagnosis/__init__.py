"""Causes of the gap between behaviour and learner: statistics of logged tokens, and findings in words."""

from collections.abc import Sequence
from dataclasses import replace

from areal_q.observability.learning_faults import with_advice
from learner.doctor.diagnosis.findings import Case, Finding, Rule
from learner.doctor.diagnosis.gap_rules import GAP_RULES
from learner.doctor.diagnosis.group_checks import LogFacts, look_at
from learner.doctor.diagnosis.record_rules import RECORD_RULES
from learner.doctor.diagnosis.text_rules import TEXT_RULES
from learner.doctor.diagnosis.token_ratios import TERMS, TokenTable

__all__ = ["TERMS", "Case", "Finding", "LogFacts", "TokenTable", "diagnose", "look_at"]


def diagnose(case: Case) -> list[Finding]:
    """Returns what keeps the whole run from learning, then the findings of all rules about the examined steps,
    errors first; empty if nothing is wrong. In a run that does not learn, a gap or a text that looks wrong
    is a consequence as likely as a cause, so that it is a note at most."""
    run = [
        Finding(fault.name, "warning" if fault.minor else "error", fault.steps, fault.says, change)
        for fault, change in with_advice(case.faults, case.run)
    ]
    others = [*_found(GAP_RULES, case), *_found(TEXT_RULES, case)]
    if run and run[0].severity == "error":
        first = f"mend first: {run[0].name}"
        others = [
            f if f.severity == "error" else replace(f, severity="note", change=first)
            for f in others
        ]
    found = [*run, *_found(RECORD_RULES, case), *others]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.severity))


def _found(rules: Sequence[Rule], case: Case) -> list[Finding]:
    return [finding for rule in rules if (finding := rule(case)) is not None]
