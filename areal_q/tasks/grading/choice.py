"""Multiple choice: finds the letter that a response chooses. Imports no torch."""

import re

from areal_q.tasks.base import Problem, Score
from areal_q.tasks.grading.boxed import last_boxed

SAID = re.compile(
    r"(?i:answer|choice|option)(?i:\s+is)?\s*[:：]?[\s*_`(]{0,4}([A-Z])(?![A-Za-z'’])"
)
"""`Answer: C`, `the answer is **(C)**`, `option C`"""
BARE = re.compile(r"[\s*_`(]{0,4}([A-Z])(?:[\s*_`).:]{0,4}|[).:]\s.*)", re.DOTALL)
"""A whole response such as `C`, `(C)`, `**C.**`, `C. Berlin`"""
WRAPPED = re.compile(r"\(?(?:\\(?:text|mathrm|textbf)\{)?\(?([A-Z])\)?\}?\)?")


def letter(response: str) -> str | None:
    """Returns the last boxed letter, else the last one that is called the answer, else the letter that the
    whole response consists of; None if there is none."""
    boxed = last_boxed(response)
    if boxed and (match := WRAPPED.fullmatch(boxed)):
        return match[1]
    said = SAID.findall(response)
    if said:
        return said[-1]
    match = BARE.fullmatch(response)
    return match[1] if match else None


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 for the right letter, else 0."""
    correct = letter(response) == problem.answer
    return Score(float(correct), correct)
