"""Stops that end a response: sequences of ids, or strings that may begin and end in the middle of a token.

A response ends with the token that completes a stop. It keeps all its tokens as they were drawn, those of the
stop included, so that the engine's log-probs and the learner's are of the same ids.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from areal_q.config import Sampling
from areal_q.tasks import stop_strings

DecodeIds = Callable[[Sequence[int]], str]
UNFINISHED = "�"
"""Character that a decoder gives for the first bytes of a character whose other bytes have not come yet"""


class TextStream:
    """Decodes the tokens of a response one by one.

    A token is decoded together with the tokens since the last complete piece of text and those of the piece
    before it, since a decoder may spell a token by its neighbours (the space at a beginning, for example).
    """

    def __init__(self, decode: DecodeIds) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._before = 0
        """Number of `_ids` at the beginning that belong to the piece before, whose text has been returned"""
        self._known = ""

    def add(self, token: int) -> tuple[str, str]:
        """Returns the new text that no later token can change, and the text after it that a later token may
        still change."""
        self._ids.append(token)
        text = self._decode(self._ids)
        new = text[len(self._known) :]
        if new.endswith(UNFINISHED):
            return "", new.rstrip(UNFINISHED)
        if new:
            del self._ids[: self._before]
            self._before, self._known = len(self._ids), self._decode(self._ids)
        return new, ""


class Stopper:
    """Checks one response for stops. Call it with each token; it returns True if the response ends there."""

    def __init__(
        self, sampling: Sampling, decode: DecodeIds | None, drawn: Iterable[int] = ()
    ) -> None:
        """Begins with the tokens `drawn`, which the response has already and which did not end it."""
        self._sequences = [list(s) for s in sampling.stop if not isinstance(s, str)]
        self._strings = stop_strings(sampling)
        self._tail: deque[int] = deque(maxlen=max(map(len, self._sequences), default=0))
        self._reach = max(map(len, self._strings), default=1) - 1
        """Most characters at the end of a text that may be the beginning of a stop string"""
        self._text = ""
        assert not self._strings or decode is not None
        self._stream = TextStream(decode) if decode and self._strings else None
        self.stopped = False
        for token in drawn:
            self(token)
        self.stopped = False

    def __call__(self, token: int) -> bool:
        self._tail.append(token)
        tail = list(self._tail)
        self.stopped = any(tail[-len(s) :] == s for s in self._sequences) or self._spells(token)
        return self.stopped

    def _spells(self, token: int) -> bool:
        if self._stream is None:
            return False
        new, pending = self._stream.add(token)
        text = self._text + new
        self._text = text[max(0, len(text) - self._reach) :] if self._reach else ""
        return any(s in text + pending for s in self._strings)


def stopper(
    sampling: Sampling, decode: DecodeIds | None, drawn: Iterable[int] = ()
) -> Stopper | None:
    """Returns a Stopper for `sampling`, or None if it has no stops."""
    return Stopper(sampling, decode, drawn) if sampling.stop else None


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """Returns `text` up to the first stop string in it."""
    places = [text.find(s) for s in stops]
    return text[: min((p for p in places if p >= 0), default=len(text))]


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
