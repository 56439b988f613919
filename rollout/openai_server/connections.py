"""A bound on the endpoint's connections, and on how long each may be without a request.

accept ─▶ Connection ─▶ aiohttp's own protocol     a token is asked for only once the headers are there
             └── hangs up: too many; no whole head of a request in time; or an answer that is not read
"""

import asyncio
from collections.abc import Callable
from typing import Any

HEAD_S = 30.0
"""Seconds in which the headers of a connection's first request must have come"""
IDLE_S = 75.0
"""Seconds in which those of the next request must have come, after an answer"""
READ_S = 60.0
"""Seconds in which a client must have read what waits for it, 64 KiB, before it is sent more"""


class Connections:
    """The connections of one server, at most `most`. Where one more comes, the one that has waited longest
    without a request is closed, so that those who say nothing shut nobody out; else the one that came."""

    def __init__(self, protocol: Callable[[], Any], most: int) -> None:
        """`protocol` makes the asyncio.Protocol that serves a connection."""
        self._protocol, self.most = protocol, most
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Those without a request, the one that has waited longest first"""

    def __call__(self) -> "Connection":
        return Connection(self._protocol(), self)


class Connection(asyncio.Protocol):
    """One connection, whose protocol is told all that happens on it."""

    def __init__(self, inner: Any, all: Connections) -> None:
        self._inner, self._all = inner, all
        self.data_received = inner.data_received
        self.eof_received = inner.eof_received
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        one_goes = len(self._all.open) >= self._all.most
        goes = next(iter(self._all.idle), self)
        self._all.open.add(self)
        self._awaits_head(HEAD_S)
        if one_goes:
            goes.hang_up()
        self._inner.connection_made(transport)

    def hang_up(self) -> None:
        """Ends this connection, which counts no more."""
        self._forget()
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._is_read()
        self._forget()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread = asyncio.get_running_loop().call_later(READ_S, self._transport.abort)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_read()
        self._inner.resume_writing()

    def _is_read(self) -> None:
        if self._unread:
            self._unread.cancel()

    def request_begins(self) -> None:
        """Notes that the headers of a request have come."""
        self._timer.cancel()
        self._all.idle.pop(self, None)

    def request_ends(self) -> None:
        """Notes that the request is answered."""
        if self in self._all.open:
            self._awaits_head(IDLE_S)

    def _awaits_head(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)
        self._all.idle[self] = None

    def _forget(self) -> None:
        self._all.open.discard(self)
        self._all.idle.pop(self, None)
