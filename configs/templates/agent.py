"""The task, with a tool: to 12+34= the model may say (12+34), the worker puts in "46 ", and it answers 46."""

import random


def problems():
    """Returns pairs of a prompt and a demonstration for the warm start, whose last word is the answer."""
    rng = random.Random(0)
    pairs = dict.fromkeys((rng.randrange(100), rng.randrange(100)) for _ in range(4000))
    return [(f"{a}+{b}=", f"({a}+{b}){a + b} {a + b}") for a, b in pairs]


def reward(response, answer):
    """Returns what a response is worth: a number, or a table of parts. From 1 on it counts as correct."""
    right = response.rpartition(" ")[2] == answer.rpartition(" ")[2]
    return {"reward": float(right), "asked_the_tool": int("(" in response)}
