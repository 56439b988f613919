"""Eight sums to a prompt, one below the other: responses of a hundred tokens, each line of which may be right.
A model that solves hardly any word problem has something to learn from these in a few steps."""

import random
import re

LINE = re.compile(r"(\d+) \+ (\d+) = (\d+)")


def problems() -> list[tuple[str, str]]:
    draw = random.Random(0)

    def problem() -> tuple[str, str]:
        pairs = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(8)]
        asked = "\n".join(f"{i}. What is {a} + {b}?" for i, (a, b) in enumerate(pairs, 1))
        right = ", ".join(f"{a} + {b} = {a + b}" for a, b in pairs)
        return f"Answer each question.\n{asked}", right

    return [problem() for _ in range(2000)]


def reward(prompt: str, response: str, answer: str) -> float:
    """Returns the share of the sums that are right where they stand last in the response."""
    wanted, said = ({(a, b): c for a, b, c in LINE.findall(text)} for text in (answer, response))
    return sum(said.get(pair) == total for pair, total in wanted.items()) / len(wanted)
