"""Clients of Redis that outlive its restarts: bounded patience, growing pauses, then BufferUnavailable."""

import asyncio
import logging
import random
import threading
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

from areal_q.errors import BufferGone, BufferUnavailable, ConfigError
from areal_q.system.credentials import check_redis_url, redis_password, shown

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
TRANSIENT = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
PATIENCE_S = 60.0
"""Covers the restart of a Redis that loads a large append-only file."""
LEAVE_S = 3.0
"""The same for a process that was told to go: where everything is, Redis may go first."""
MAX_PAUSE_S = 1.0
SAY_AGAIN_S = 30.0
CONNECT_S = 5.0
"""For the learner's connections, of which there are few: a host that is gone refuses nothing, it is silent."""
SOCKET_TIMEOUT_S = 30.0
"""Above any BLOCK that we ask for, and long enough for a large record on a busy server."""
CONNECTIONS = 8
"""Most connections of a worker, whose groups in flight take turns: a command holds one for a moment. One for
each of hundreds of groups would be a herd of TLS handshakes at every start, none done in time on a busy
machine, and would fill Redis's `maxclients` with a few dozen workers."""


def connect(url: str) -> redis.Redis:
    options = {"socket_connect_timeout": CONNECT_S, **_options(url)}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


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


class Outage:
    """The time for which Redis does not answer a client, whose calls share it: the log has one line when it
    begins, one every SAY_AGAIN_S while it lasts, and one at its end, however many calls are tried again."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_s = self._next_s = 0.0

    def goes_on(self, where: str, error: Exception) -> None:
        """Takes note of a call that failed."""
        self._last_s = now_s = time.monotonic()
        if self._since_s is None:
            self._since_s, self._next_s = now_s, now_s + SAY_AGAIN_S
            logger.warning("redis at %s: %s; trying again", where, error)
        elif now_s >= self._next_s:
            self._next_s = now_s + SAY_AGAIN_S
            lasts_s = now_s - self._since_s
            logger.warning("redis at %s: for %.0f s now: %s", where, lasts_s, error)

    def answered(self, *, after_failure: bool) -> None:
        """Takes note of a call that succeeded. One that never failed says little of the others: a Redis whose
        disk is full answers whoever only reads."""
        now_s = time.monotonic()
        if self._since_s is not None and (after_failure or now_s - self._last_s > SAY_AGAIN_S):
            logger.info("redis answers again, after %.1f s", now_s - self._since_s)
            self._since_s = None


class Patience:
    """The time for which one operation is tried again. `pause` gives the wait before the next try, or gives
    up: sooner where `stop` says that this process was told to go."""

    def __init__(
        self,
        url: str,
        seconds: float,
        outage: Outage | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._where = shown(url)
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._pause_s = 0.05
        self._failed = False
        self._outage, self._stop = outage or Outage(), stop
        self._given_up: type[BufferUnavailable] = BufferUnavailable

    def pause(self, error: Exception) -> float:
        """Seconds. Raises BufferUnavailable once patience is over, and at once for a wrong password."""
        if isinstance(error, redis.AuthenticationError):
            raise BufferUnavailable(f"{self._where}: {error}") from error
        now_s = time.monotonic()
        if self._stop is not None and self._stop.is_set():
            self._until = min(self._until, now_s + LEAVE_S)
            self._stop, self._given_up = None, BufferGone
        if now_s >= self._until:
            lasted = "" if self._given_up is BufferGone else f" (for {self._seconds:g} s)"
            raise self._given_up(f"{self._where}: {error}{lasted}") from error
        self._failed = True
        self._outage.goes_on(self._where, error)
        self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
        # Clients that lost Redis at the same moment do not come back at the same one.
        return self._pause_s * random.uniform(0.5, 1.0)

    def wait(self, error: Exception) -> None:
        """Pauses before the next try; a stop request ends the pause."""
        pause_s = self.pause(error)
        if self._stop is None:
            time.sleep(pause_s)
        else:
            self._stop.wait(pause_s)

    def over(self) -> None:
        """Takes note that the operation succeeded."""
        self._outage.answered(after_failure=self._failed)


def insist(patience: Patience, call: Callable[[], _T], *, disk: bool = True) -> _T:
    """`call`, repeated while Redis does not answer or, with `disk`, cannot write its append-only file. It may
    happen twice: it must be repeatable."""
    while True:
        try:
            result = call()
        except TRANSIENT as error:
            patience.wait(error)
        except redis.ResponseError as error:
            if not (disk and cannot_persist(error)):
                raise
            patience.wait(error)
        else:
            patience.over()
            return result


async def insist_async(patience: Patience, call: Callable[[], Awaitable[_T]]) -> _T:
    """The same for coroutines. A cancellation always gets through: redis-py awaits `asyncio.wait_for`, which
    before Python 3.12 forgets one that comes together with the answer, or with the end of the connection."""
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    while True:
        results: list[_T] = []
        failure: Exception | None = None
        try:
            results.append(await call())
            patience.over()
        except TRANSIENT as error:
            failure = error
        except redis.ResponseError as error:
            if not cannot_persist(error):
                raise
            failure = error
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError
        if failure is None:
            return results[0]
        await asyncio.sleep(patience.pause(failure))


def refuses_writes(error: redis.ResponseError) -> bool:
    """True when Redis is full under `noeviction`, or cannot write its append-only file."""
    # Redis 6 wraps an error inside a script into one of another class.
    full = isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error)
    return full or cannot_persist(error)


def cannot_persist(error: redis.ResponseError) -> bool:
    """True while its disk is full or gone: then it refuses also what needs no memory, such as claims."""
    return "MISCONF" in str(error)
