"""A task: problems to train on, problems held out, and a reward. Imports no torch."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class Problem(Struct, frozen=True):
    """Example: Problem("12+34=", "64") in the reversed arithmetic task."""

    prompt: str
    answer: str


class Score(Struct, frozen=True):
    """A reward and what it is the sum of. `correct` is what evaluation counts as accuracy."""

    reward: float
    correct: bool
    parts: dict[str, float] = {}


class Tokenizer(Protocol):
    """Text to ids and back; `save` writes what `transformers.AutoTokenizer` loads."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, directory: str) -> None: ...


class Task(Protocol):
    """`train` and `heldout` share no problem; `score` is pure and never raises for any response."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]

    def score(self, problem: Problem, response: str) -> Score: ...
