"""A worker as Redis knows it: a consumer of the group that reads both ticket streams."""

import functools
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError

from buffer.redis_store import lua_scripts
from buffer.redis_store.connection import (
    Outage,
    Patience,
    connect_async,
    insist_async,
    refuses_writes,
)
from buffer.redis_store.keys import WORKERS_GROUP, Keys

_T = TypeVar("_T")
Parts = list[bytes | memoryview]
"""Bytes that are sent one after the other"""
STREAM_GONE = ("NOGROUP", "no such key", "UNBLOCKED")
"""Texts by which Redis's errors say that a stream or its consumer group does not exist"""


class TicketConsumer:
    """A worker's consumer. Calls are repeated for `patience_s` seconds while Redis does not answer."""

    def __init__(self, url: str, keys: Keys, worker: str, patience_s: float) -> None:
        self.url, self.patience_s = url, patience_s
        self.keys = keys
        self.redis = connect_async(url)
        # The name is unique, so that a restarted worker is not taken for the dead one of the same name.
        self.name = f"{worker}-{uuid.uuid4().hex[:12]}"
        self._outage = Outage()
        self._swept_s = time.monotonic()
        self._scripts = {
            name: self.redis.register_script(getattr(lua_scripts, name))
            for name in ("CLAIM", "COMMIT", "RENEW", "HEARTBEAT", "RELEASE", "QUARANTINE", "SWEEP")
        }

    @property
    def streams(self) -> list[str]:
        return [self.keys.eval_tickets, self.keys.tickets]

    async def read_new(self, count: int, wait_ms: int) -> Any:
        """Returns XREADGROUP's reply: up to `count` new entries of each stream."""
        streams: dict[Any, Any] = dict.fromkeys(self.streams, ">")
        return await self._on_group(
            lambda: self.redis.xreadgroup(
                WORKERS_GROUP, self.name, streams, count=count, block=wait_ms
            )
        )

    async def script(
        self, name: str, keys: list[str], *args: Any, record: Callable[[], Parts] = list
    ) -> Any:
        """Runs a script on behalf of this consumer. `record` makes the parts of its last argument, if there are
        any, each time that a connection is free for it. Redis receives a large argument without a copy if it
        is the last."""
        script = self._scripts[name]
        everything = ["EVALSHA", script.sha, len(keys), *keys, WORKERS_GROUP, self.name, *args]

        async def run() -> Any:
            try:
                return await self._exchange(everything, record)
            except NoScriptError:
                await self.redis.script_load(script.script)
                return await self._exchange(everything, record)

        return await self._on_group(run)

    async def _exchange(self, args: list[Any], record: Callable[[], Parts]) -> Any:
        """Sends a command and returns its answer, without redis-py's layers in between, which take as long."""
        pool = self.redis.connection_pool
        connection = await pool.get_connection()
        try:
            # Nothing keeps the command while the answer is awaited, so that the next one takes its memory.
            await connection.send_packed_command(_packed(args, record()))
            return await connection.read_response()
        finally:
            await pool.release(connection)

    async def quarantine(self, stream: str, entry: str, reason: str) -> None:
        keys = [stream, self.keys.quarantine, self.keys.set_aside]
        args = [entry, reason, WORKERS_GROUP]
        await self.call(functools.partial(self._scripts["QUARANTINE"], keys, args))

    async def sweep(self, every_s: float) -> None:
        """Removes the consumers of workers that are gone, and lets claims run out that are from before Redis's
        clock stepped back, once in `every_s` seconds, the claim timeout. While Redis is full the consumers
        stay, since Redis 6.2 then refuses every XGROUP."""
        if time.monotonic() - self._swept_s < every_s:
            return
        self._swept_s = time.monotonic()
        args = [WORKERS_GROUP, round(every_s * 1000)]
        try:
            for stream in self.streams:
                await self._on_group(functools.partial(self._scripts["SWEEP"], [stream], args))
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise

    async def _on_group(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Returns the result of `call`. If the consumer groups do not exist, they are created and `call` is
        repeated. That happens before the learner's start, after Redis lost its data, and when a new run of the
        same name deletes them while a claim waits."""
        try:
            return await self.call(call)
        except redis.ResponseError as error:
            if not any(reason in str(error) for reason in STREAM_GONE):
                raise
        for stream in self.streams:
            try:
                await self.call(
                    functools.partial(
                        self.redis.xgroup_create, stream, WORKERS_GROUP, id="0", mkstream=True
                    )
                )
            except redis.ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
        return await self.call(call)

    async def call(self, call: Callable[[], Awaitable[_T]]) -> _T:
        return await insist_async(Patience(self.url, self.patience_s, self._outage), call)


def _packed(args: list[Any], record: Parts) -> list[Any]:
    """Returns `args`, and `record` as the last one if it has parts, in Redis's protocol."""
    encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    lines = [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in encoded]
    head = b"*%d\r\n%b" % (len(lines) + bool(record), b"".join(lines))
    if not record:
        return [head]
    return [head + b"$%d\r\n" % sum(map(len, record)), *record, b"\r\n"]
