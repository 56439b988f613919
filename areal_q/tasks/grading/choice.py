"""Multiple choice: finds the letter that a response chooses. Imports no torch."""

import re
from collections.abc import Iterable, Iterator
from string import ascii_uppercase

from areal_q.tasks.base import Problem, Score
from areal_q.tasks.grading.boxed import last_boxed

_OFFERED = re.compile(r"^[ \t(]*([A-Z])[.):][ \t]", re.MULTILINE)
"""A line of the prompt such as `C. Berlin`"""
_MARKUP = re.compile(
    r"\\(?:text|math)[a-z]*|(?<![A-Za-z])['’]|['’](?![A-Za-z])|[*_`\"“”‘$\\(\[{<>]"
)
"""What is only around a letter: `**C**`, `\\(C\\)`, `\\text{C}`, `'C'`, `<answer>C`"""
_LETTER = (
    r"(?!I [a-z])(?-i:([A-Z](?![\w'’])|[a-z](?=\))))"
    r"(?! ?\)? (?:is|was)(?:n['’]t| not| wrong| incorrect| false)\b)"
)
"""A letter that is neither a pronoun nor said to be wrong; a small one needs its bracket."""
_LINK = r"(?: (?:is|must be|would be|should be)\b)?[\s:：=→-]*(?:(?:option|choice)\b[ :]*)?"
_ANSWER = re.compile(rf"(?:answer|答案是?|réponse){_LINK}{_LETTER}", re.IGNORECASE)
_CONCLUSION = re.compile(
    rf"(?:answer[^.\n]{{0,80}}? (?:is|but)|\b(?:choice|option|it is|it['’]s|must be|choose|pick|select|go with"
    rf"|therefore|thus|hence|so)\b,?){_LINK}{_LETTER}",
    re.IGNORECASE,
)
"""`it must be C`, `I choose option C`, `the answer to this is C`"""
_CONFIRMED = re.compile(rf"\b{_LETTER}\)? (?:is|was) (?:the )?(?:correct|right|best|answer)\b")
_BRACKETED = (
    r"(?:(?!n['’]t\b|\b(?:not|nor|or|n?either|whether|wrong|incorrect|false)\b|[.?!] )[^\n()\[\]]){1,80}"
    r"[(\[](?:(?:option|choice) )?(?-i:([A-Z]))[)\]]"
    r"(?! (?:or|and|(?:is|was)(?:n['’]t| not| wrong| incorrect| false))\b)"
)
"""`Berlin (C)`, a choice's own words before its letter, without a word that denies it"""
_NAMED = [
    re.compile(cue + _BRACKETED, re.IGNORECASE)
    for cue in (
        r"answer\b[^.\n]{0,80}?(?:\b(?:is|be|but)\b|:)",
        r"\b(?:choice is|option is|it is|it['’]s|must be|choose|pick|select|go with)\b",
    )
]
"""`The answer is Berlin (C)`, `it must be Berlin (C)`"""
_NAMED_ALONE = re.compile(rf"\A{_BRACKETED}[\s.!]*\Z", re.IGNORECASE)
_LONGEST_CLAUSE = 300
"""Characters before a letter in which a denial of it is looked for"""
_DENIED = re.compile(r"n['’]t\b|\b(?:not|cannot|never|unlikely|exclude|eliminate)\b", re.IGNORECASE)
_CLAUSE = re.compile(
    r"[.!?;:\n]|\bbut\b|, (?=(?:the|my|it|so|I|we|hence|thus|therefore)\b)", re.IGNORECASE
)
"""The end of a clause, beyond which a denial does not reach"""
_ALONE = re.compile(r"\s*([A-Za-z])[\s).:,}\]]*")
_FIRST = re.compile(r"\s*([A-Z]) ?[).:]\s.*", re.DOTALL)
"""`C. Berlin`"""


def letter(response: str, offered: str = ascii_uppercase) -> str | None:
    """Returns the letter in the last box, else the last one that is called the answer, else the last that is
    concluded, else the one that the whole response, its last line or its first consists of, else the last in
    brackets behind the words of a choice; None if there is none.

    Only the letters in `offered` count.
    """
    text = re.sub(r"[ \t]+", " ", _MARKUP.sub(" ", response))
    boxed = _MARKUP.sub(" ", last_boxed(response) or "")
    lines = text.strip().splitlines() or [""]
    bare = re.sub(r"[*_`$\\]", "", response)
    for found in (
        (_ALONE.fullmatch(boxed), _FIRST.fullmatch(boxed)),
        _ANSWER.finditer(text),
        sorted([*_CONCLUSION.finditer(text), *_CONFIRMED.finditer(text)], key=re.Match.start),
        (_ALONE.fullmatch(lines[0]), _FIRST.fullmatch(text), _ALONE.fullmatch(lines[-1])),
        *(_affirmed(bare, named.finditer(bare)) for named in _NAMED),
        _affirmed(bare, _NAMED_ALONE.finditer(bare)),
    ):
        letters = [match[1].upper() for match in found if match]
        if chosen := [each for each in letters if each in offered]:
            return chosen[-1]
    return None


def _affirmed(text: str, matches: Iterable[re.Match[str]]) -> Iterator[re.Match[str]]:
    """Yields the matches in `text` whose clause does not deny what it says: `it cannot be Berlin (C)`"""
    for match in matches:
        start = match.start(1)
        *_, clause = _CLAUSE.split(text[max(0, start - _LONGEST_CLAUSE) : start])
        if not _DENIED.search(clause):
            yield match


def offered(problem: Problem) -> str:
    """Returns the letters of the choices in the prompt, such as "ABCD"; all letters if it lists no two, or not
    the right one."""
    listed = set(_OFFERED.findall(problem.prompt))
    missing = next((i for i, each in enumerate(ascii_uppercase) if each not in listed), 26)
    letters = ascii_uppercase[:missing]
    return letters if missing > 1 and _right(problem) in letters else ascii_uppercase


def _right(problem: Problem) -> str:
    return problem.answer.strip().upper()


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 for the right letter, else 0."""
    correct = letter(response, offered(problem)) == _right(problem)
    return Score(float(correct), correct)
