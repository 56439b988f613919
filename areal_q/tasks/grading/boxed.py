"""Answers in \\boxed{…}, compared by math-verify. Imports no torch; math-verify only where it is used."""

import importlib
import logging
import re

from areal_q.tasks.base import Problem, Score

BRACE = re.compile(
    r"(\\(?:boxed|fbox)\s*\{)|[{}]|\\boxed(?:\s*(-?[0-9](?:[0-9.,/]*[0-9])?)|\s+([A-Za-z])\b)"
)
"""The beginning of a box, a brace, or a box without braces, `\\boxed 5`"""
_GAP = re.compile(r"(?<=[0-9])(?:,?\\!|\\[,:; ]|\{,\}|[\u00a0\u2009\u202f~])(?=[0-9]{3}(?![0-9]))")
"""What separates the digits of a number in LaTeX, and spaces at which no line breaks"""
_UNIT = re.compile(
    r"(?<=[0-9]) +(?!(?:hundred|thousand|[mb]illion|dozen|half|halves|percent|pi|squared|cubed)\b)"
    r"([A-Za-z]{2,}(?: [A-Za-z]+)*)$"
)
"""Words behind a number, but for those that change it"""
_POWER_OF_TEN = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,2})")
"""`1e3`, whose `e` is Euler's number to math-verify"""
_MAX_CHARACTERS = 500
"""Longest answer that is graded, since the parser would take long for a longer one"""


def last_boxed(text: str) -> str | None:
    """Returns the content of the last `\\boxed{…}` or `\\fbox{…}` whose braces balance; None if there is none.

    Example: "so \\boxed{1}, no: \\boxed{\\frac{1}{2}}" is "\\frac{1}{2}".
    """
    starts: list[int] = []
    start, end = -1, -1
    for match in BRACE.finditer(text):
        if match.lastindex and match.lastindex > 1:  # without braces
            start, end = match.span(match.lastindex)
        elif match[0] != "}":
            starts.append(match.end() if match[1] else -1)
        elif starts and (begin := starts.pop()) > start:
            start, end = begin, match.start()
    return text[start:end].strip() if start >= 0 else None


def join_digits(text: str) -> str:
    """Returns the text without what LaTeX puts between the digits of a number: "2\\,000" is "2000"."""
    return _GAP.sub("", text)


def answer(response: str) -> str | None:
    """Returns the last boxed text without spaces and dollar signs; equal values may be spelled in other
    ways."""
    boxed = last_boxed(response)
    return "".join(join_digits(boxed).replace("$", "").split()) if boxed else None


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the last boxed expression has the value of the answer, else 0. It may take long
    (see Grader.slow).

    math-verify's own timeouts rely on signals and are turned off; its process is killed instead.
    """
    given = answer(response)
    if given is None or len(given) > _MAX_CHARACTERS:
        return Score(0.0, False)
    if given == "".join(problem.answer.replace("$", "").split()):
        return Score(1.0, True)
    math_verify = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected, found = (
        math_verify.parse(f"$\\boxed{{{_plain(text)}}}$", parsing_timeout=None)
        for text in (problem.answer, last_boxed(response) or "")
    )
    correct = bool(math_verify.verify(expected, found, timeout_seconds=None))
    return Score(float(correct), correct)


def _plain(text: str) -> str:
    """Returns an expression as math-verify reads it: digits without gaps, words after a number as a unit, which
    it leaves out, and 1e3 as a power of ten."""
    text = join_digits(text.strip("$ "))
    if power := _POWER_OF_TEN.fullmatch(text):
        return rf"{power[1]} \cdot 10^{{{power[2]}}}"
    return _UNIT.sub(r"\\text{ \1}", text)
