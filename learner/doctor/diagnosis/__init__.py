"""Causes of the gap between behaviour and learner: statistics of logged tokens, and findings in words."""

from learner.doctor.diagnosis.findings import Case, Finding, diagnose
from learner.doctor.diagnosis.group_checks import LogFacts, look_at
from learner.doctor.diagnosis.token_ratios import TERMS, TokenTable

__all__ = ["TERMS", "Case", "Finding", "LogFacts", "TokenTable", "diagnose", "look_at"]
