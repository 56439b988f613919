"""GSM8K word problems (Cobbe et al., arXiv 2110.14168) and their reward. Imports no torch."""

import re
from collections import deque
from decimal import Decimal

from areal_q.config.tasks import Gsm8k
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.datasets.calculator import plain_number
from areal_q.tasks.datasets.jsonl_rows import Row, read_rows

_PROMPTS = {
    "chat": "{}\n\nReason step by step, then give the final number after ####.",
    "plain": "Question: {}\nAnswer:",
}

_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A number in running text. A minus sign after a word, a digit or a bracket is a subtraction."""


def problems(cfg: Gsm8k) -> list[Problem]:
    """Returns all problems of the file. Raises TaskError naming file and line."""
    return [_problem(row, cfg.template) for row in read_rows(cfg.path)]


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the response's final number equals the answer, else 0."""
    found = final_number(response)
    correct = found is not None and found == final_number(problem.answer)
    return Score(float(correct), correct)


def final_number(text: str) -> Decimal | None:
    """Returns the number after the last `####`; without one, the text's last number; None if it has none.

    Examples: "so #### $1,200." is 1200, "5 apples or 10%" is 10, "12 - 3 = 9.0" is 9.
    """
    _, mark, tail = text.rpartition("####")
    match = _NUMBER.search(tail) if mark else None
    if match is None:
        match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    value = Decimal(match[1].replace(",", ""))
    return value.copy_negate() if match[0][0] in "-−" else value


def answer(response: str) -> str | None:
    value = final_number(response)
    return None if value is None else plain_number(value)


def _problem(row: Row, template: str) -> Problem:
    _, mark, answer = row.answer.rpartition("####")
    if not mark or final_number(answer) is None:
        raise TaskError(f"{row.where}: the answer does not end with a line `#### number`")
    return Problem(_PROMPTS[template].format(row.question), answer.strip())
