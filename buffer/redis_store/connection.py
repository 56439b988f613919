"""Clients of Redis that survive its restarts: they retry with growing pauses, and then raise
BufferUnavailable."""

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
from redis.exceptions import AskError, ClusterDownError, OutOfMemoryError, TryAgainError
from redis.retry import Retry

from areal_q.errors import BufferGone, BufferUnavailable, ConfigError
from areal_q.system.credentials import check_redis_url, redis_password, shown

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
TRANSIENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    ClusterDownError,
    TryAgainError,
)
PATIENCE_S = 60.0
"""Seconds for which an operation is retried, enough for a Redis that restarts and loads a large append-only
file"""
LEAVE_S = 3.0
"""Seconds for which a process that was told to stop retries an operation, since Redis may have been stopped
first"""
MAX_PAUSE_S = 1.0
SAY_AGAIN_S = 30.0
CONNECT_S = 5.0
"""Seconds after which the learner gives up a connection attempt, which a host that is down does not answer"""
SOCKET_TIMEOUT_S = 30.0
"""Seconds to wait for an answer: longer than any BLOCK, and enough for a large record on a busy server"""
CONNECTIONS = 8
"""Most connections of a worker. Its groups in flight share them, since a command needs one only for a moment.
With one for each of hundreds of groups, the TLS handshakes of a start could time out on a busy machine, and a
few dozen workers would reach Redis's `maxclients`."""


def connect(url: str) -> redis.Redis:
    options = {"socket_connect_timeout": CONNECT_S, **_options(url)}
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)


def connect_async(url: str) -> redis.asyncio.Redis:
    options = {"retry": AsyncRetry(NoBackoff(), 0), **_options(url)}
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=CONNECTIONS, timeout=SOCKET_TIMEOUT_S, **options
    )
    return redis.asyncio.Redis.from_pool(pool)


def _options(url: str) -> dict[str, Any]:
    """Returns the client's options from `url`. Raises ConfigError if it is not the URL of a Redis."""
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
    """Logs when Redis does not answer a client. All calls of the client share it, so that there is one line
    when an outage begins, one every SAY_AGAIN_S while it lasts and one at its end, however many calls are
    retried."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_s = self._next_s = 0.0

    def goes_on(self, where: str, error: Exception) -> None:
        """Records a call that failed."""
        self._last_s = now_s = time.monotonic()
        if self._since_s is None:
            self._since_s, self._next_s = now_s, now_s + SAY_AGAIN_S
            logger.warning("redis at %s: %s; trying again", where, error)
        elif now_s >= self._next_s:
            self._next_s = now_s + SAY_AGAIN_S
            lasts_s = now_s - self._since_s
            logger.warning("redis at %s: for %.0f s now: %s", where, lasts_s, error)

    def answered(self, *, after_failure: bool) -> None:
        """Records a call that succeeded. If it did not fail before, that does not end the outage at once, since
        a Redis whose disk is full still answers reads."""
        now_s = time.monotonic()
        if self._since_s is not None and (after_failure or now_s - self._last_s > SAY_AGAIN_S):
            logger.info("redis answers again, after %.1f s", now_s - self._since_s)
            self._since_s = None


class Patience:
    """The time for which one operation is retried, `seconds` in all. Once `stop` is set, as this process was
    told to stop, only LEAVE_S are left."""

    def __init__(
        self,
        url: str,
        seconds: float,
        outage: Outage | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._url = url
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._pause_s = 0.05
        self._failed = False
        self._outage, self._stop = outage or Outage(), stop
        self._given_up: type[BufferUnavailable] = BufferUnavailable

    def pause(self, error: Exception) -> float:
        """Returns the seconds to wait before the next try. Raises BufferUnavailable after `seconds`, and at
        once for a wrong password; raises BufferGone instead once `stop` is set and LEAVE_S are over."""
        if isinstance(error, redis.AuthenticationError):
            raise BufferUnavailable(f"{shown(self._url)}: {error}") from error
        now_s = time.monotonic()
        if self._stop is not None and self._stop.is_set():
            self._until = min(self._until, now_s + LEAVE_S)
            self._stop, self._given_up = None, BufferGone
        if now_s >= self._until:
            lasted = "" if self._given_up is BufferGone else f" (for {self._seconds:g} s)"
            raise self._given_up(f"{shown(self._url)}: {error}{lasted}") from error
        self._failed = True
        self._outage.goes_on(shown(self._url), error)
        self._pause_s = min(MAX_PAUSE_S, self._pause_s * 2)
        # The pause is random, so that clients which lost Redis at the same moment do not all return together.
        return self._pause_s * random.uniform(0.5, 1.0)

    def wait(self, error: Exception) -> None:
        """Pauses before the next try; a stop request ends the pause."""
        pause_s = self.pause(error)
        if self._stop is None:
            time.sleep(pause_s)
        else:
            self._stop.wait(pause_s)

    def over(self, refusal: redis.ResponseError | None = None) -> None:
        """Records that Redis answered the operation, be it with a refusal. Raises ConfigError for that of a
        server of a Redis Cluster which does not have the run: all its keys lie on one."""
        self._outage.answered(after_failure=self._failed)
        if isinstance(refusal, AskError):  # MovedError is one
            raise ConfigError(
                f"{shown(self._url)}: this server of a Redis Cluster does not have the run; name the one "
                f"that has, {refusal.host}:{refusal.port}"
            ) from refusal


def insist(patience: Patience, call: Callable[[], _T], *, disk: bool = True) -> _T:
    """Returns the result of `call`, which is repeated while Redis does not answer or, with `disk`, cannot write
    its append-only file. Redis may execute it twice, so that it must be repeatable."""
    while True:
        try:
            result = call()
        except TRANSIENT as error:
            patience.wait(error)
        except redis.ResponseError as error:
            if not (is_replica(error) or (disk and cannot_persist(error))):
                patience.over(error)
                raise
            patience.wait(error)
        else:
            patience.over()
            return result


async def insist_async(patience: Patience, call: Callable[[], Awaitable[_T]]) -> _T:
    """Does the same as `insist` for coroutines. No cancellation is lost, although redis-py awaits
    `asyncio.wait_for`, which before Python 3.12 forgets one that arrives together with the answer or with the
    end of the connection."""
    task = asyncio.current_task()
    cancellations = task.cancelling() if task else 0
    while True:
        results: list[_T] = []
        failure: Exception | None = None
        refusal: redis.ResponseError | None = None
        try:
            results.append(await call())
        except TRANSIENT as error:
            failure = error
        except redis.ResponseError as error:
            if is_replica(error) or cannot_persist(error):
                failure = error
            else:
                refusal = error
        if task and task.cancelling() > cancellations:
            raise asyncio.CancelledError
        if failure is None:
            patience.over(refusal)
            if refusal is not None:
                raise refusal
            return results[0]
        await asyncio.sleep(patience.pause(failure))


def refuses_writes(error: redis.ResponseError) -> bool:
    """Returns True if Redis is full under `noeviction`, or cannot write its append-only file, or finds no
    further id in a stream until the learner has given its entries others."""
    # Redis 6 reports an error inside a script as an error of another class.
    full = isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error)
    return full or cannot_persist(error) or "exhausted the last possible ID" in str(error)


def is_replica(error: redis.ResponseError) -> bool:
    """Returns True if this Redis is a replica, or a primary that lacks replicas: for as long as another takes
    over."""
    return any(word in str(error) for word in ("READONLY", "NOREPLICAS"))


def cannot_persist(error: redis.ResponseError) -> bool:
    """Returns True if Redis cannot write its append-only file. It then also refuses commands that need no
    memory, such as claims."""
    return "MISCONF" in str(error)
