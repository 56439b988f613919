"""Clients of Redis that outlive its restarts: bounded patience, growing pauses, then BufferUnavailable."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from areal_q.errors import BufferUnavailable, ConfigError
from areal_q.system.credentials import check_redis_url, redis_password, shown

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
TRANSIENT = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
PATIENCE_S = 60.0
"""Covers the restart of a Redis that loads a large append-only file."""
MAX_PAUSE_S = 1.0
SOCKET_TIMEOUT_S = 30.0
"""Above any BLOCK that we ask for, and long enough for a large record on a busy server."""
CONNECTIONS = 8
"""Most connections of a worker, whose groups in flight take turns: a command holds one for a moment. One for
each of hundreds of groups would be a herd of TLS handshakes at every start, none done in time on a busy
machine, and would fill Redis's `maxclients` with a few dozen workers."""


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(url))


def connect_async(url: str) -> redis.asyncio.Redis:
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=SOCKET_TIMEOUT_S,
        retry=AsyncRetry(NoBackoff(), 0),
        **_options(url),
    )
    return redis.asyncio.Redis.from_pool(pool)


def _options(url: str) -> dict[str, Any]:
    """Raises ConfigError for what is no URL of a Redis."""
    check_redis_url(url)
    try:
        parse_url(url)
    except ValueError as error:
        raise ConfigError(f"--redis, or REDIS_URL: {error}") from error
    return {
        "password": redis_password(url),
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "health_check_interval": 0,
    }


class Patience:
    """The time for which one operation is tried again. `pause` gives the wait before the next try, or gives
    up."""

    def __init__(self, url: str, seconds: float) -> None:
        self._where = shown(url)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._pause_s = 0.05

    def pause(self, error: Exception) -> float:
        """Seconds. Raises BufferUnavailable once patience is over, and at once for a wrong password."""
        if isinstance(error, redis.AuthenticationError):
            raise BufferUnavailable(f"{self._where}: {error}") from error
        if time.monotonic() >= self._until:
            raise BufferUnavailable(f"{self._where}: {error} (for {self._seconds:g} s)") from error
        if self._pause_s == 0.05:
            logger.warning("redis: %s; trying again", error)
        self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
        return self._pause_s


def insist(patience: Patience, call: Callable[[], _T], *, disk: bool = True) -> _T:
    """`call`, repeated while Redis does not answer or, with `disk`, cannot write its append-only file. It may
    happen twice: it must be repeatable."""
    while True:
        try:
            return call()
        except TRANSIENT as error:
            time.sleep(patience.pause(error))
        except redis.ResponseError as error:
            if not (disk and cannot_persist(error)):
                raise
            time.sleep(patience.pause(error))


async def insist_async(patience: Patience, call: Callable[[], Awaitable[_T]]) -> _T:
    """The same for coroutines. A cancellation always gets through: redis-py awaits `asyncio.wait_for`, which
    before Python 3.12 forgets one that comes together with the answer."""
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    while True:
        try:
            result = await call()
        except TRANSIENT as error:
            await asyncio.sleep(patience.pause(error))
        except redis.ResponseError as error:
            if not cannot_persist(error):
                raise
            await asyncio.sleep(patience.pause(error))
        else:
            if task and task.cancelling() > cancellations:
                raise asyncio.CancelledError
            return result


def refuses_writes(error: redis.ResponseError) -> bool:
    """True when Redis is full under `noeviction`, or cannot write its append-only file."""
    # Redis 6 wraps an error inside a script into one of another class.
    full = isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error)
    return full or cannot_persist(error)


def cannot_persist(error: redis.ResponseError) -> bool:
    """True while its disk is full or gone: then it refuses also what needs no memory, such as claims."""
    return "MISCONF" in str(error)
