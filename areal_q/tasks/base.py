"""A task: problems to train on, problems held out, and a reward. Imports no torch."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from areal_q.messages.trajectories import FailureCause


class Problem(Struct, frozen=True):
    """A prompt and its answer, such as Problem("12+34=", "64") in the reversed arithmetic task."""

    prompt: str
    answer: str


class Score(Struct, frozen=True):
    """A reward and the parts that it is the sum of. `correct` counts as the accuracy in evaluations."""

    reward: float
    correct: bool
    parts: dict[str, float] = {}
    valid: bool = True
    """False if nothing is known about the response, since the reward function failed"""
    failure: FailureCause | None = None
    """Why the reward function failed; None if it did not"""

    @classmethod
    def failed(cls, cause: FailureCause) -> "Score":
        """Returns a score that is not valid: nothing is known about the response."""
        return cls(0.0, False, valid=False, failure=cause)

    @classmethod
    def zero(cls, cause: FailureCause, failure: FailureCause | None = None) -> "Score":
        """Returns a reward of 0 for a failure. `failure` is recorded if the settings say so and the response is
        not the cause."""
        parts = {"error": 1.0, "timeout": float(cause == "timeout")}
        return cls(0.0, False, parts, failure=failure)


Message = dict[str, str]
"""`role` and `content`"""


class Tokenizer(Protocol):
    """Converts text to ids and back. `save` writes files that `transformers.AutoTokenizer` loads."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a whole conversation and of the beginning of the reply to it."""
        ...

    def encode_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Returns the ids between the content of an assistant's message and that of its next one, with
        `messages` in between. `ended` is True if the end-of-text token of the first one is there already."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, directory: str) -> None: ...


class Task(Protocol):
    """Problems to train on and problems to evaluate on; `train` and `heldout` share none."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]


class Grader(Struct, frozen=True):
    """How a task scores responses, without its problems, which a worker does not need."""

    score: Callable[[Problem, str], Score]
    """Pure function from (problem, response) to a score, which raises for no response"""
    answer: Callable[[str], str | None]
    """Function that returns the answer in a response, for majority votes, in one spelling for equal answers;
    None if there is none"""
    slow: bool = False
    """True if it may take long or hang, so that it must run in a process that can be killed"""
    zero_on: tuple[FailureCause, ...] = ()
    """Failures that the response causes, whose reward is 0"""
    needs: str | None = None
    """A module that it imports, from the extra with the name of the grader"""
