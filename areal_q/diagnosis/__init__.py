"""Why behaviour and learner disagree: pure statistics of logged tokens, and what they mean in words."""

from areal_q.diagnosis.findings import Case, Finding, diagnose
from areal_q.diagnosis.groups import LogFacts, look_at
from areal_q.diagnosis.tokens import TERMS, TokenTable

__all__ = ["TERMS", "Case", "Finding", "LogFacts", "TokenTable", "diagnose", "look_at"]
