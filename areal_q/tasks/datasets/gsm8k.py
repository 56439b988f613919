"""GSM8K word problems (Cobbe et al., arXiv 2110.14168) and their reward. Imports no torch."""

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal

from areal_q.config.tasks import Gsm8k
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.calculator import plain_number
from areal_q.tasks.datasets.jsonl_rows import WorkedRow, read_rows
from areal_q.tasks.grading.boxed import join_digits, last_boxed

_PROMPTS = {
    "chat": "{}\n\nReason step by step, then give the final number after ####.",
    "plain": "Question: {}\nAnswer:",
}

_DIGITS = r"""(?:[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9])                              # 1.000.000
    |(?:[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"""  # 1,000.50 or .5
_MORE = r"""(?:[\d²³¹⁰-⁹¼-¾⅐-⅞] | [./_][0-9] | \^\{?[-−–]?[0-9] | :[0-9]{1,2}(?![0-9]) | ,[0-9]{3}(?![0-9])
    |['’][0-9] | [eE][+-]?[0-9] | [xX][0-9] | 0[xX] | [kKMB](?!\w))[\w.,:/^]*"""
"""What makes the digits before it another number, or none: 12:30, 1_000, 12,345,67, 2^10, 1e400, 18k"""
_NUMBER = re.compile(
    rf"""((?<![\w.)])[-−–](?:\((?=\\?[$€£]?[0-9.,]+\)))?)?\\?[$€£]?(?:([0-9]+)\ (?=[0-9]+/[0-9]))?
    ({_DIGITS})(?:[eE]([+-]?[0-9]{{1,2}})(?!\w))?(?:\ ?/\ ?({_DIGITS}))?({_MORE})?""",
    re.VERBOSE,
)
"""A number in running text, also `3/4`, `2 1/2` and `-(18)`. A minus sign after a word, a digit or a bracket is
a subtraction."""
_COMPUTED = re.compile(
    r"(?:[,:]|\*\*|[ \t]+|[ \t]*(?:[-−–+*·×÷^/xX]|\\(?:times|cdot|div)\b)[-−–\\$€£( \t]*)\.?[0-9]"
)
"""What follows a number that is but the beginning of what is stated: `10 - 5`, `3 \\times 4`, `1,5`"""
_SAID = re.compile(
    r"answer\W{0,3}?(?:is\b|[:：=>])[\s:：=*$(\\]*(?=[-−–.0-9€£])([^\n]*)", re.IGNORECASE
)
"""`the answer is 5`, `**Answer**: $5`, `<answer>5`; the group is the rest of the line"""
_SENTENCE_END = re.compile(r"[;!?]|</|\.(?![0-9])")
_BOLD = re.compile(r"\*\*(?![0-9]+\.\s)(?=[^*\n0-9]*[0-9])([^*\n]*+)(?<!:)\*\*(?!:)")
"""What is bold in the last line, but for a heading such as `**Step 2:**` or `**2. Total**`"""
_SIGN = re.compile(r"(?:[-−–]|minus\b|negative\b)[ \t]*\(?|—(?=[0-9$.])", re.IGNORECASE)
_SPACED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
"""`1 000`"""
_REMARK = re.compile(r"\([^()=]*=[^()]*\)")
_FRACTION = re.compile(
    r"((?<=[0-9]) ?)?\\[dt]?frac ?(?:\{ ?([0-9]+) ?\}|([0-9])) ?(?:\{ ?([0-9]+) ?\}|([0-9]))"
)
"""`\\frac{3}{4}` and `\\frac34`"""


def problems(cfg: Gsm8k) -> list[Problem]:
    """Returns all problems of the file. Raises TaskError naming file and line."""
    return [_problem(row, cfg.template) for row in read_rows(cfg.path)]


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the response's final number equals the answer, else 0."""
    found = final_number(response)
    correct = found is not None and found == stated(problem.answer)
    return Score(float(correct), correct)


def final_number(text: str) -> Decimal | None:
    """Returns the number after the last `####`; without one that in the last box, else that which is called the
    answer, else one that is bold in the last line, else the text's last number; None if it has none.

    Examples: "so #### $1,200." is 1200, "5 apples or 10%" is 10, "\\boxed{9}, after 3 steps" is 9.
    """
    text = _plain(text)
    for statement in _statements(text):
        if found := _first(statement):
            return _whole(found)
    last = deque(_NUMBER.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def ends_with_number(text: str) -> bool:
    """Returns True if the last line is `####` and nothing but a number, in a spelling that is read there."""
    before, _, number = (text.strip().splitlines() or [""])[-1].strip().partition("####")
    found = None if before else _in_part(_plain(number))
    if found is None or found.start() or _value(found) is None:
        return False
    return not found.string[found.end() :].strip(" \t.,)")


def _statements(text: str) -> Iterator[str]:
    """Yields the parts of a response that say which number is the answer, the most explicit one first."""
    _, mark, tail = text.rpartition("####")
    if mark:
        yield (tail.strip().splitlines() or [""])[0]
    yield last_boxed(text) or ""
    for said in deque(_SAID.findall(text), maxlen=1):
        yield _SENTENCE_END.split(said, maxsplit=1)[0]
    yield from _BOLD.findall(text.rstrip().rpartition("\n")[2])[:1]


def stated(label: str) -> Decimal | None:
    """Returns the number that an answer in the data says, behind `####` if that is there; None if it says none
    that can be read."""
    found = _first(_plain(label.rpartition("####")[2]))
    return _whole(found) if found else None


def _first(statement: str) -> re.Match[str] | None:
    """Returns the first number after the last `=` of a statement, or of all of it; None if it has none.

    Examples: "5 + 3 = 8 apples" is 8, "- 5" is -5, "1 000" is 1000, "150 (= 2.5 hours)" is 150.
    """
    text = _REMARK.sub("", statement)
    return _in_part(text.rpartition("=")[2]) or _in_part(text)


def _in_part(part: str) -> re.Match[str] | None:
    part = _SPACED.sub(lambda spaced: spaced[0].replace(" ", ""), part.strip(" \t*$"))
    return _NUMBER.search(_SIGN.sub("-", part, count=1) if _SIGN.match(part) else part)


def _plain(text: str) -> str:
    """Returns the text with the numbers of LaTeX as others write them: "2\\frac{1}{2}" is "2 1/2"."""
    return _FRACTION.sub(
        lambda of: f"{'' if of[1] is None else ' '}{of[2] or of[3]}/{of[4] or of[5]}",
        join_digits(text),
    )


def _whole(match: re.Match[str]) -> Decimal | None:
    """Returns the number that _NUMBER matched in a statement; None where it is the beginning of a sum."""
    return None if _COMPUTED.match(match.string, match.end()) else _value(match)


def _value(match: re.Match[str]) -> Decimal | None:
    """Returns the number that _NUMBER matched; None if more than a number stands there, such as 12:30. Of a
    fraction it has 28 digits, so that equal ones are equal."""
    sign, whole, above, power, below, more = match.groups()
    if more:
        return None
    try:
        value = Decimal(f"{_digits(above)}e{power or 0}")
        if below:
            value = (Decimal(whole or 0) * _digits(below) + value) / _digits(below)
    except ArithmeticError:  # 1/0
        return None
    return value.copy_negate() if sign else value


def _digits(digits: str) -> Decimal:
    digits = digits.replace(",", "")
    return Decimal(digits.replace(".", "") if digits.count(".") > 1 else digits)


def answer(response: str) -> str | None:
    value = final_number(response)
    return None if value is None else plain_number(value)


def _problem(row: WorkedRow, template: str) -> Problem:
    _, mark, answer = row.answer.rpartition("####")
    if not mark or stated(answer) is None:
        raise TaskError(f"{row.where}: the answer does not end with a line `#### number`")
    return Problem(_PROMPTS[template].format(row.question), answer.strip(), columns=row.columns)
