"""The task: sums, last digit first, 58+67= becomes 521. Put your own problems and reward here."""

import itertools
import random

LARGEST = 99


def problems():
    """Returns pairs of a prompt and its answer; the last share of them is held out."""
    pairs = [*itertools.product(range(LARGEST + 1), repeat=2)]
    random.Random(0).shuffle(pairs)
    return [(f"{a}+{b}=", str(a + b)[::-1]) for a, b in pairs]


def reward(response, answer):
    """Returns what a response is worth: a number, or a table of parts. From 1 on it counts as correct."""
    right, is_number = response == answer, response.isdecimal()
    off_by = abs(int(response[::-1]) - int(answer[::-1])) if is_number else 0
    return {"reward": float(right), "is_number": int(is_number), "off_by": off_by}
