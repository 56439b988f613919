"""Connections that follow a run through a Redis Cluster, and on asyncio send without waiting.

All keys of a run lie in one slot (buffer/redis_store/keys.py), so one server of the cluster has the whole run.
A client begins at the server that its URL names. One that does not have the run answers with the address of the
one that has, and the client's connections go there from then on. If that one cannot be reached, the next
attempt begins at the URL's server again, which knows of a replica that took over. The client sees every such
answer as a lost connection, after which it repeats the command (buffer/redis_store/connection.py).
"""

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.connection import parse_url
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

_ELSEWHERE = (AskError, ClusterDownError, TryAgainError)  # MovedError is an AskError


class Address:
    """Host and port that the connections of one client go to next."""

    def __init__(self, host: str, port: int) -> None:
        self._first = self.now = (host, port)

    def lost(self) -> None:
        """Goes back to the server that the URL names, as the present one cannot be reached."""
        self.now = self._first

    def redirected(self, error: redis.ResponseError) -> redis.ConnectionError:
        """Follows `error` if it says where the run is now; returns the error to raise in its place."""
        if isinstance(error, MovedError):
            self.now = error.host or self.now[0], error.port
        return redis.ConnectionError(f"redis cluster: {type(error).__name__}: {error}")


def following(url: str, *, asynchronous: bool) -> dict[str, Any]:
    """Returns the options with which redis-py's `from_url` makes such connections."""
    found = parse_url(url)
    if "path" in found:
        return {"connection_class": _AsyncUnixConnection} if asynchronous else {}
    plain, encrypted = _ASYNC if asynchronous else _SYNC
    kind = encrypted if url.startswith("rediss://") else plain
    address = Address(found.get("host", "localhost"), found.get("port", 6379))
    return {"connection_class": kind, "address": address}


class _Connection(redis.Connection):
    def __init__(self, *args: Any, address: Address, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = address

    def _connect(self) -> Any:
        self.host, self.port = self._address.now
        try:
            return super()._connect()
        except (OSError, redis.ConnectionError, redis.TimeoutError):
            self._address.lost()
            raise

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except _ELSEWHERE as error:
            self.disconnect()
            raise self._address.redirected(error) from error


class _Sender(AbstractConnection):
    """Hands a command to the socket and leaves it to `read_response` to wait, whose timeout covers both.
    redis-py waits for the sending as well, in a task of its own, which costs a quarter of a small command."""

    async def connect(self) -> None:
        if not self.is_connected:  # which redis-py asks only after three more coroutines
            await super().connect()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect()
        assert self._writer
        self._writer.writelines([command] if isinstance(command, bytes) else command)


class _AsyncUnixConnection(_Sender, redis.asyncio.UnixDomainSocketConnection):
    pass


class _AsyncConnection(_Sender, redis.asyncio.Connection):
    def __init__(self, *args: Any, address: Address, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = address

    async def _connect(self) -> None:
        self.host, self.port = self._address.now
        try:
            await super()._connect()
        except (OSError, TimeoutError, redis.ConnectionError, redis.TimeoutError):
            self._address.lost()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except _ELSEWHERE as error:
            await self.disconnect(nowait=True)
            raise self._address.redirected(error) from error


class _TlsConnection(_Connection, redis.SSLConnection):
    pass


class _AsyncTlsConnection(_AsyncConnection, redis.asyncio.SSLConnection):
    pass


_SYNC, _ASYNC = (_Connection, _TlsConnection), (_AsyncConnection, _AsyncTlsConnection)
