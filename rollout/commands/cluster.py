"""A running cluster on one screen. Everything shown is published anyway, so looking costs the run nothing:

    Redis         heartbeats of the workers, streams, memory        (buffer/admin/inspect_state.py)
    the learner   its newest versions, queried over ZeroMQ          (buffer/weight_sync/client.py)

A step publishes a version, so the newest version's age is the time since the last step.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import redis
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from areal_q.errors import WeightVersionError
from areal_q.messages import HeldVersion, WorkerStatus
from areal_q.observability.run_summary import plural
from areal_q.system.command import escaped
from areal_q.system.disk import size
from buffer.admin import inspect_state, tables
from buffer.redis_store.keys import Keys
from buffer.redis_store.learner_side import read_heartbeats
from buffer.weight_sync import WeightSource
from buffer.weight_sync.client import WeightClient

FULL = 0.9
"""Share of Redis's memory limit above which `areal-q status` warns"""
LATE_S = 1.0
"""Seconds by which a worker's event loop may be late before `areal-q status` warns"""


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `areal-q status --json` prints."""

    run: str
    version: int | None
    """Newest version that the learner serves, which is the number of steps it has done; None if it does not
    answer."""
    starting: bool = False
    """True if the learner has begun a short while ago, so that nothing need answer yet."""
    digest: str = ""
    since_step_s: float | None = None
    """Seconds since that version was published"""
    weights_bytes: int = 0
    delta_bytes: int | None = None
    subscribers: int = 0
    workers: list[WorkerStatus]
    redis: inspect_state.Status
    wrong: list[str]


def gather(
    client: redis.Redis, run: str, source: WeightSource, silent_s: float, held: bool = False
) -> ClusterStatus:
    """Returns the state of run `run`, whose directory may be `held` by processes of it. `silent_s` is how many
    seconds without news count as a fault. Raises redis.RedisError if Redis does not answer, and ConfigError for
    CURVE keys that cannot be used."""
    keys = Keys(run)
    names: Any = client.smembers(keys.workers)
    told: Any = client.mget([*map(keys.worker, sorted(names))]) if names else []
    beats, refused = read_heartbeats(sorted(names), told)
    buffer = inspect_state.read_status(client, run)
    newest, subscribers = _learner(client, run, source)
    since = None if newest is None else max(0.0, time.time() - newest.published_s)
    led_s = _led_s(client, run)
    starting = held and newest is None if led_s is None else led_s <= silent_s
    return ClusterStatus(
        run=run,
        version=newest.version if newest else None,
        starting=starting,
        digest=newest.digest if newest else "",
        since_step_s=since,
        weights_bytes=newest.nbytes if newest else 0,
        delta_bytes=newest.delta_bytes if newest else None,
        subscribers=subscribers,
        workers=beats,
        redis=buffer,
        wrong=[
            *([] if starting else _missing(newest, beats)),
            *_wrong(since, silent_s, newest, beats, buffer),
            *refused,
            *_starves(client, run),
        ],
    )


def _learner(client: redis.Redis, run: str, source: WeightSource) -> tuple[HeldVersion | None, int]:
    """Returns the learner's newest version and its number of subscribers; (None, 0) if the learner does not
    answer or has published nothing yet."""
    told: Any = client.hget(Keys(run).info, "endpoints")
    if told is None:
        return None, 0
    ends = source.endpoints(msgspec.json.decode(told, type=dict[str, str]))
    asked = WeightClient(*ends, source.load_keys(None))
    try:
        held = asked.held()
    except WeightVersionError:
        return None, 0
    finally:
        asked.close()
    return held.versions[-1] if held.versions else None, held.stats.get("subscribers", 0)


def _starves(client: redis.Redis, run: str) -> list[str]:
    """Returns the learner's own explanation of why it gets no groups, if it has one."""
    said: Any = client.hget(Keys(run).owner, "starves")
    return [said.decode()] if said else []


def _led_s(client: redis.Redis, run: str) -> float | None:
    """Returns for how many seconds the present learner has led the run; None if none has a lease."""
    found: Any = client.hmget(Keys(run).owner, ["token", "until"])
    seconds, micros = client.time()  # type: ignore[misc]
    # A learner's token is the time, by Redis's clock, at which it acquired the run.
    token_s, until_s = (int(value or 0) / 1e3 for value in found)
    now_s = seconds + micros / 1e6
    return now_s - token_s if until_s > now_s else None


def _missing(newest: HeldVersion | None, workers: list[WorkerStatus]) -> Iterator[str]:
    if newest is None:
        yield "the learner does not answer"
    if not workers:
        yield "no worker has sent a heartbeat"


def _wrong(
    since_s: float | None,
    silent_s: float,
    newest: HeldVersion | None,
    workers: list[WorkerStatus],
    buffer: inspect_state.Status,
):
    if since_s is not None and since_s > silent_s:
        yield f"no new version for {tables.age(since_s)}"
    for w in workers:
        if w.behind_s > silent_s:
            yield f"{w.worker}: newer weights known for {tables.age(w.behind_s)}, and none arrived"
        if w.loop_lag_s > LATE_S:
            yield f"{w.worker}: its event loop is {w.loop_lag_s:.1f} s late: heartbeats and swaps wait"
        if newest and w.version == newest.version and w.digest not in ("", newest.digest):
            yield f"{w.worker}: runs other bytes than version {w.version} was published with"
    if buffer.limit_bytes and buffer.used_bytes > FULL * buffer.limit_bytes:
        yield f"redis is {buffer.used_bytes / buffer.limit_bytes:.0%} full"
    if buffer.policy != "noeviction":
        yield f"redis may lose groups: maxmemory-policy is {buffer.policy}"


def screen(found: ClusterStatus) -> RenderableType:
    return Group(
        _head(found),
        _worker_table(found),
        *_waits(found.workers),
        tables.status_table(found.redis),
        *(Text(f"WRONG: {escaped(line)}", style="bold red") for line in found.wrong),
    )


def _head(found: ClusterStatus) -> Text:
    if found.version is None:
        return Text("learner: starting" if found.starting else "learner: no answer")
    delta = "" if found.delta_bytes is None else f", delta {size(found.delta_bytes)}"
    return Text(
        f"learner: step {found.version}, the last one {tables.age(found.since_step_s)} ago\n"
        f"weights: version {found.version}, {found.digest}, {size(found.weights_bytes)}{delta}; "
        f"{plural(found.subscribers, 'listener')}\n"
    )


def _worker_table(found: ClusterStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "version", "behind", "tok/s", "idle", "active", "groups", "waiting"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    agents = any(w.episodes for w in found.workers)
    if agents:
        table.add_column("episodes open", justify="right")
    for w in found.workers:
        behind = "–" if found.version is None else str(found.version - w.version)
        numbers = (f"{w.tokens_per_s:,.0f}", f"{w.idle_share:.0%}", w.active, w.groups, w.waiting)
        cells = (str(w.version), behind, *map(str, numbers))
        episodes = [f"{w.open_episodes} of {w.episodes}"] * agents
        table.add_row(escaped(w.worker), *cells, *episodes)
    total = sum(w.tokens_per_s for w in found.workers)
    table.add_row(plural(len(found.workers), "worker"), "", "", f"{total:,.0f}", style="dim")
    return table


def _waits(workers: list[WorkerStatus]) -> Iterator[Text]:
    """Yields a line for each worker that waits, and one for the worst event loop, since columns for them would
    not fit into 80 characters."""
    for w in workers:
        if w.waits_for:
            yield Text(escaped(f"{w.worker} waits for {w.waits_for}"))
    if workers:
        p99_s, max_s = max((w.loop_lag_s, w.loop_lag_max_s) for w in workers)
        late = f"event loops late by {p99_s * 1e3:,.0f} ms (p99), {max_s * 1e3:,.0f} ms at most"
        yield Text(late, style="dim")
