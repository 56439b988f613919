"""The task: digits in order, 4182= becomes 1248. Put your own problems and reward here."""

import random

DIGITS = 4


def problems():
    """Returns pairs of a prompt and its answer; the last tenth is held out."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(4000)]
    return [(f"{text}=", "".join(sorted(text))) for text in dict.fromkeys(texts)]


def reward(response, answer):
    """Returns what a response is worth: a number, or a table of parts. From 1 on it counts as correct."""
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return {"reward": float(response == answer), "right_places": right / len(answer)}
