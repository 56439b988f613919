"""What crosses between a model's code and the tests of it: plain data, and the names of everything else.

    3, "a", None, 1.5, True             themselves
    ["list", 1, 2], ["tuple", …]        containers, with their kind first
    ["bytes", "6162"], ["Decimal", "1"] others that are made of a text
    ["object", 7], ["function", 2]      what stays where it is, by its number there

It is JSON: decoding it runs nothing. A value of a derived type crosses as its base, so that no method of the
code's own judges a comparison: an `int` whose `==` is always true arrives as an `int`.
"""

import builtins
import json
import numbers
import socket
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_BYTES = 4 << 20
"""Longest message"""
MOST_DIGITS = 100_000
"""Longest number: to read one takes time that grows with the square of its digits"""

MOST_WORDS = 500
"""Characters of an error's message"""

_ITEMS: dict[type, Callable[[Any], Any]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
}
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    complex: (complex.__repr__, complex),
    Decimal: (str, Decimal),
    Fraction: (str, Fraction),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
}
_READ_ITEMS = {kind.__name__: kind for kind in _ITEMS}
_READ_TEXTS = {kind.__name__: read for kind, (_, read) in _TEXTS.items()}


def encoded(value: Any, otherwise: Callable[[Any], list[Any]]) -> Any:
    """Returns `value` as JSON has it; `otherwise` gives the reference to what is no data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):  # NumPy's are such
        return int(value)
    for kind, (written, _) in _TEXTS.items():
        if isinstance(value, kind):
            return [kind.__name__, written(value)]
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        pairs = [encoded(one, otherwise) for pair in dict.items(value) for one in pair]
        return ["dict", *pairs]
    for kind, items in _ITEMS.items():
        if isinstance(value, kind):
            return [kind.__name__, *(encoded(item, otherwise) for item in items(value))]
    return otherwise(value)


def decoded(data: Any, refer: Callable[[str, Any], Any]) -> Any:
    """Returns the value; `refer(kind, number)` gives what a reference stands for. Raises ValueError or
    TypeError for what is no such data."""
    if not isinstance(data, list):
        return data
    kind, *items = data
    if kind in _READ_TEXTS:
        return _READ_TEXTS[kind](*items)
    if kind in _READ_ITEMS or kind == "dict":
        values = [decoded(item, refer) for item in items]
        if kind == "dict":
            return dict(zip(values[::2], values[1::2], strict=True))
        return _READ_ITEMS[kind](values)
    return refer(kind, *items)


class PeerGone(BaseException):
    """The other end is gone. No `except Exception` of a test takes it for an answer."""


class CodeRaised(Exception):
    """The other side raised an exception that is none of Python's own."""


def raised(error: BaseException) -> list[str]:
    """Returns the message that tells of an exception."""
    return ["raised", type(error).__name__, str(error)[:MOST_WORDS]]


def error_of(name: str, message: str) -> Exception:
    """Returns the exception that the other side raised, so that `except ValueError` sees it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # it needs more than a message
            pass
    return CodeRaised(f"{name}: {message}")


class Channel:
    """Messages over a socket, each JSON after its length in 4 bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._file = sock, sock.makefile("rb")

    def send(self, message: Any) -> None:
        """Raises ValueError for a message that is too long, or no JSON, and OSError if the other end is
        gone."""
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"{len(data)} bytes, and {MOST_BYTES} may cross")
        self._socket.sendall(len(data).to_bytes(4, "little") + data)

    def receive(self) -> Any:
        """Raises PeerGone at the end, and ValueError or RecursionError for what is no message."""
        size = int.from_bytes(self._file.read(4), "little")
        if not size:
            raise PeerGone
        if size > MOST_BYTES:
            raise ValueError(f"{size} bytes, and {MOST_BYTES} may cross")
        return json.loads(self._file.read(size))

    def close(self) -> None:
        self._file.close()
        self._socket.close()
