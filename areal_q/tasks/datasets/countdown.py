"""Countdown: make a target out of given numbers: `3,5,7 22=` is answered `3*5+7`. Imports no torch."""

import hashlib
import itertools
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from areal_q.config.tasks import Countdown
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, Score
from areal_q.tasks.lazy import Lazy

_MAX_CHARACTERS = 200
"""Longest expression that is read; six numbers need far fewer characters."""
_HELD_OUT_SHARE = 8
"""One in so many sets of numbers is held out, chosen by hash, so that every run holds out the same ones."""
_MAX_REPEATS = 10
"""Draws for each distinct problem, on average, after which there are taken to be no more"""
_TRIES = 100_000
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_WORDS = (
    "Using each of the numbers {} exactly once, with + - * / and brackets, write an expression that "
    "equals {}. Give it between <answer> and </answer>."
)
_PROMPTS = {"bare": "{} {}=", "chat": _WORDS, "plain": _WORDS + "\n"}
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")


class CountdownTask:
    """Generated problems, split by their sets of numbers, so that no held-out set is trained on."""

    def __init__(self, cfg: Countdown) -> None:
        """Generates the problems. Raises TaskError if the settings allow too few."""
        distinct: dict[str, Problem] = {}
        for index in itertools.count():
            problem = _generate(cfg, index, heldout=True)
            distinct.setdefault(problem.prompt, problem)
            if len(distinct) == cfg.heldout:
                break
            if index > _MAX_REPEATS * len(distinct):
                few = f"not much more than {len(distinct)} problems to hold out"
                raise TaskError(f"task.heldout = {cfg.heldout}: {few}")
        self.heldout: Sequence[Problem] = tuple(distinct.values())
        self.train: Sequence[Problem] = Lazy(
            partial(_generate, cfg, heldout=False), range(cfg.problems)
        )


def _generate(cfg: Countdown, index: int, heldout: bool) -> Problem:
    """Returns problem `index`. Numbers are drawn and combined until the target is in range, so that there is a
    solution. Raises TaskError if that hardly ever happens."""
    rng = random.Random(2 * index + heldout)
    for _ in range(_TRIES):
        numbers = [rng.randint(1, cfg.largest) for _ in range(cfg.numbers)]
        digest = hashlib.blake2b(repr(sorted(numbers)).encode()).digest()
        if (digest[0] % _HELD_OUT_SHARE == 0) != heldout:
            continue
        value, solution = _combine(rng, numbers)
        if value.denominator == 1 and 1 <= value <= cfg.largest_target:
            listed = ",".join(map(str, numbers))
            return Problem(_PROMPTS[cfg.template].format(listed, value), solution)
    raise TaskError(f"task.largest_target = {cfg.largest_target} is hardly ever met: raise it")


def _combine(rng: random.Random, numbers: list[int]) -> tuple[Fraction, str]:
    """Returns the value and text of a random expression of all numbers, with brackets only where needed."""
    terms = [(Fraction(n), str(n), 3) for n in numbers]
    while len(terms) > 1:
        a, b = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        operator = rng.choice("+-*/" if b[0] else "+-*")
        level = _PRECEDENCE[operator]
        left = a[1] if a[2] >= level else f"({a[1]})"
        # The right operand of - and / needs brackets at equal precedence too.
        right = b[1] if b[2] > level or (b[2] == level and operator in "+*") else f"({b[1]})"
        terms.append((_apply(operator, a[0], b[0]), left + operator + right, level))
    return terms[0][0], terms[0][1]


def _apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    """Returns the value of a operator b. Raises ZeroDivisionError."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case _:
            return a / b


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Returns the value of an expression and the sorted numbers in it; None unless it consists of whole
    numbers, + - * / and brackets.

    It uses Dijkstra's two stacks, without recursion, and executes nothing.
    """
    tokens = (
        re.findall(r"[0-9]+|[-+*/()]|\S", expression) if len(expression) <= _MAX_CHARACTERS else []
    )
    values: list[Fraction] = []
    operators: list[str] = []
    numbers: list[int] = []
    operand = True
    """True if a number or an opening bracket must come next."""
    try:
        for token in tokens:
            if operand and token.isascii() and token.isdigit():
                numbers.append(int(token))
                values.append(Fraction(numbers[-1]))
                operand = False
            elif operand and token == "(":
                operators.append(token)
            elif not operand and token == ")":
                _reduce(values, operators, 1)
                if not operators:
                    return None
                operators.pop()
            elif not operand and token in _PRECEDENCE:
                _reduce(values, operators, _PRECEDENCE[token])
                operators.append(token)
                operand = True
            else:
                return None
        if operand:
            return None
        _reduce(values, operators, 1)
    except ZeroDivisionError:
        return None
    return None if operators else (values[0], sorted(numbers))


def _reduce(values: list[Fraction], operators: list[str], level: int) -> None:
    """Applies the operators on top that bind at least as strongly as `level`, down to a bracket."""
    while operators and _PRECEDENCE.get(operators[-1], 0) >= level:
        b, a = values.pop(), values.pop()
        values.append(_apply(operators.pop(), a, b))


def answer(response: str) -> str | None:
    """Returns the expression between the last <answer> tags, else in the last line, without anything after
    `=`."""
    tagged = _ANSWER.findall(response)
    text = tagged[-1] if tagged else (response.strip().splitlines() or [""])[-1]
    expression = "".join(text.partition("=")[0].split())
    return expression or None


def score(problem: Problem, response: str) -> Score:
    """Returns a reward of 1 if the expression has the numbers and the value of the known solution, else 0."""
    expression = answer(response)
    correct = expression is not None and evaluate(expression) == evaluate(problem.answer)
    return Score(float(correct), correct)
