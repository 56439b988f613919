"""A task: problems to train on, problems held out, and a reward. Imports no torch."""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from areal_q.messages.trajectories import FailureCause


class Problem(Struct, frozen=True):
    """Example: Problem("12+34=", "64") in the reversed arithmetic task."""

    prompt: str
    answer: str


class Score(Struct, frozen=True):
    """A reward and what it is the sum of. `correct` is what evaluation counts as accuracy."""

    reward: float
    correct: bool
    parts: dict[str, float] = {}
    valid: bool = True
    """True if the reward says something about the response."""
    failure: FailureCause | None = None
    """Why there is no other score."""

    @classmethod
    def failed(cls, cause: FailureCause) -> "Score":
        """No score at all: what the response is worth is not known."""
        return cls(0.0, False, valid=False, failure=cause)

    @classmethod
    def zero(cls, cause: FailureCause, failure: FailureCause | None = None) -> "Score":
        """Returns a failure that counts as a reward of 0; `failure` is recorded where this is a choice of
        settings and not the fault of the response."""
        parts = {"error": 1.0, "timeout": float(cause == "timeout")}
        return cls(0.0, False, parts, failure=failure)


Message = dict[str, str]
"""`role` and `content`"""


class Tokenizer(Protocol):
    """Text to ids and back; `save` writes what `transformers.AutoTokenizer` loads."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Returns a whole conversation, and the start of the reply to it."""
        ...

    def encode_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Returns what stands between the end of an assistant's message and the start of its next one, with
        `messages` in between; `ended`: the first one's end-of-text token is there already."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, directory: str) -> None: ...


class Task(Protocol):
    """`train` and `heldout` share no problem."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]


class Grader(Struct, frozen=True):
    """How answers are judged, without the data: all that a worker needs of a task."""

    score: Callable[[Problem, str], Score]
    """Pure; never raises for any response."""
    answer: Callable[[str], str | None]
    """What a response answers, in one spelling for equal answers, for majority votes; None if nothing."""
    slow: bool = False
    """It may take long or hang: it runs in a process that can be killed."""
    zero_on: tuple[FailureCause, ...] = ()
    """Failures of which the response is the cause: it is worth 0."""
    needs: str | None = None
    """A module of the extra that is named like the grader."""
