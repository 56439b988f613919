"""Why behaviour and learner disagree: pure statistics of logged tokens, and what they mean in words."""

from learner.doctor.diagnosis.findings import Case, Finding, diagnose
from learner.doctor.diagnosis.group_checks import LogFacts, look_at
from learner.doctor.diagnosis.token_ratios import TERMS, TokenTable

__all__ = ["TERMS", "Case", "Finding", "LogFacts", "TokenTable", "diagnose", "look_at"]
