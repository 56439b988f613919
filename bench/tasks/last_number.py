"""The reward of configs/smollm2-sums.toml as a file, for programs of other projects: the last number counts."""

import re


def reward(prompt: str, response: str, answer: str) -> float:
    numbers = re.findall(r"[0-9]+", response)
    return float(bool(numbers) and numbers[-1] == answer)
