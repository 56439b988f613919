"""GSM8K word problems (Cobbe et al., arXiv 2110.14168) and their reward. Imports no torch."""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from decimal import Decimal

from areal_q.config.tasks import Gsm8k
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.rows import Row, read_rows, split

PROMPTS = {
    "chat": "{}\n\nReason step by step, then give the final number after ####.",
    "plain": "Question: {}\nAnswer:",
}

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-−])?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
"""A number in running text. A minus sign after a word, a digit or a bracket is a subtraction."""


class Gsm8kTask:
    """The last share of the rows is held out; a question that also appears there is not trained on."""

    def __init__(self, cfg: Gsm8k) -> None:
        """Raises TaskError naming file and line."""
        train, heldout = split(read_rows(cfg.path), cfg.heldout, cfg.path)
        self.heldout: Sequence[Problem] = tuple(_problems(heldout, cfg.template))
        kept = {p.prompt for p in self.heldout}
        self.train: Sequence[Problem] = tuple(
            p for p in _problems(train, cfg.template) if p.prompt not in kept
        )
        if not self.train:
            raise TaskError(f"{cfg.path}: every question to train on is also held out")

    def score(self, problem: Problem, response: str) -> Score:
        return score(problem, response)


def score(problem: Problem, response: str) -> Score:
    """1 if the response's final number equals the answer, else 0."""
    found = final_number(response)
    correct = found is not None and found == final_number(problem.answer)
    return Score(float(correct), correct)


def final_number(text: str) -> Decimal | None:
    """The number after the last `####`; without one, the text's last number; None if it has none.

    Examples: "so #### $1,200." is 1200, "5 apples or 10%" is 10, "12 - 3 = 9.0" is 9.
    """
    _, mark, tail = text.rpartition("####")
    match = NUMBER.search(tail) if mark else None
    if match is None:
        match = next(iter(deque(NUMBER.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    value = Decimal(match[1].replace(",", ""))
    return value.copy_negate() if match[0][0] in "-−" else value


def _problems(rows: Sequence[Row], template: str) -> Iterator[Problem]:
    for row in rows:
        _, mark, answer = row.answer.rpartition("####")
        if not mark or final_number(answer) is None:
            raise TaskError(f"{row.where}: the answer does not end with a line `#### number`")
        yield Problem(PROMPTS[template].format(row.question), answer.strip())
