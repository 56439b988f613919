"""Stops of a response: a sequence of ids, or a string that may begin and end inside of tokens.

A response ends with the token that completes a stop. All its tokens stay as they were drawn, those of the
stop included, so that their log-probs and those that a learner computes are of the same ids.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from areal_q.config import Sampling

DecodeIds = Callable[[Sequence[int]], str]
UNFINISHED = "�"
"""Character with which a decoder spells the first bytes of a character whose last ones are still to come"""


class TextStream:
    """Text of tokens as they come.

    A token is decoded together with those since the last complete piece of text, and the ones of the
    piece before: a decoder may spell a token by what stands around it (the space at a beginning).
    """

    def __init__(self, decode: DecodeIds) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._before = 0
        """Number of `_ids` that belong to the piece before, whose text is known"""
        self._known = ""

    def add(self, token: int) -> tuple[str, str]:
        """Returns (new text that no later token will change, the text after it so far that may still
        change)."""
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
    """Watches one response; called with each of its tokens, it says whether the response ends there."""

    def __init__(
        self, sampling: Sampling, decode: DecodeIds | None, drawn: Iterable[int] = ()
    ) -> None:
        """`drawn`: tokens that the response has already, and that did not end it."""
        self._sequences = [list(s) for s in sampling.stop if not isinstance(s, str)]
        self._strings = stop_strings(sampling)
        self._tail: deque[int] = deque(maxlen=max(map(len, self._sequences), default=0))
        self._reach = max(map(len, self._strings), default=1) - 1
        """Number of characters that may be the beginning of a stop string"""
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
    """None where there is nothing to watch for."""
    return Stopper(sampling, decode, drawn) if sampling.stop else None


def stop_strings(sampling: Sampling) -> tuple[str, ...]:
    return tuple(s for s in sampling.stop if isinstance(s, str))


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str:
    """`text` up to the first of the strings."""
    places = [text.find(s) for s in stops]
    return text[: min((p for p in places if p >= 0), default=len(text))]


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of one of the strings."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
