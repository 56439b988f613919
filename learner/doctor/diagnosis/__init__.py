"""Causes of the gap between behaviour and learner: statistics of logged tokens, and findings in words."""

from learner.doctor.diagnosis.findings import Case, Finding, Rule
from learner.doctor.diagnosis.gap_rules import GAP_RULES
from learner.doctor.diagnosis.group_checks import LogFacts, look_at
from learner.doctor.diagnosis.record_rules import RECORD_RULES
from learner.doctor.diagnosis.text_rules import TEXT_RULES
from learner.doctor.diagnosis.token_ratios import TERMS, TokenTable

__all__ = ["TERMS", "Case", "Finding", "LogFacts", "TokenTable", "diagnose", "look_at"]

RULES: tuple[Rule, ...] = (*RECORD_RULES, *GAP_RULES, *TEXT_RULES)


def diagnose(case: Case) -> list[Finding]:
    """Returns the findings of all rules, errors first; empty if no rule applies."""
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    return sorted(found, key=lambda f: ("error", "warning", "note").index(f.severity))
