"""A user's own task: add fourteen digits, with every running total written out.

`7+5+9=` is answered `07+5=12,12+9=21`. With fourteen digits an answer has 103 characters and the end of text. A
reward of 1 needs only the number after the last `=`.
"""

import random
from itertools import accumulate

DIGITS = 14
PROBLEMS = 8192


def problems():
    rng = random.Random(0)
    return [_problem([rng.randint(1, 9) for _ in range(DIGITS)]) for _ in range(PROBLEMS)]


def reward(prompt, response, answer):
    return float(_result(response) == _result(answer))


def _problem(digits):
    totals = [*accumulate(digits)]
    steps = zip(totals, digits[1:], totals[1:], strict=False)
    return "+".join(map(str, digits)) + "=", ",".join(f"{a:02}+{b}={c:02}" for a, b, c in steps)


def _result(text):
    return text.rpartition("=")[2].strip()
