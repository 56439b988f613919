"""The changes that an operator can make to a run's state in Redis, and the export of its groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import redis

from areal_q.errors import BufferFull, ConfigError, LogError, RecordError
from areal_q.messages import Group, decode_group, decode_ticket, encode
from buffer.admin import inspect_state
from buffer.admin.inspect_state import RefusedRecord
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.redis_store import lua_scripts
from buffer.redis_store.connection import refuses_writes
from buffer.redis_store.keys import RECORD, Keys
from buffer.redis_store.streams import READ_PAGE

NOT_TAKEN = -1
"""Version that an exported log gives in place of the learner's, since no learner has taken its groups"""

What = Literal["quarantine", "groups", "all"]


def export_groups(client: redis.Redis, run: str, directory: Path) -> int:
    """Writes the committed groups to `directory` as a trajectory log, with READ_PAGE groups as one `step`,
    and returns their number. They stay in Redis. Raises LogError if the directory exists and is not empty."""
    if directory.exists() and any(directory.iterdir()):
        raise LogError(f"{directory}: not empty")
    found = (group for _, group in inspect_state.groups(client, run))
    log, count = TrajectoryLog(directory), 0
    try:
        for step, page in enumerate(iter(lambda: list(islice(found, READ_PAGE)), [])):
            log.append(step, NOT_TAKEN, page)
            count += len(page)
    finally:
        log.close()
    return count


def import_groups(
    client: redis.Redis, run: str, directory: Path, from_step: int = 0, to_step: int | None = None
) -> tuple[int, int]:
    """Adds the logged groups to the run's stream, bit for bit as workers committed them. Returns how many were
    added, and how many were left out because the stream has a group of their ticket. A call that failed can
    therefore be repeated. A learner uses only the groups that it still waits for (learner/data/admission.py).

    Raises LogError if there is no log, and BufferFull if Redis is full.
    """
    if not any(directory.glob("part-*.parquet")):
        raise LogError(f"{directory}: no trajectory log there")
    keys, passed = Keys(run), 0
    known = {group.ticket.number for _, group in inspect_state.groups(client, run)}
    added = 0
    for _, logged in iter_log(directory, from_step, to_step):
        fresh: dict[int, Group] = {}
        for group in logged:
            if group.ticket.number not in known:
                fresh.setdefault(group.ticket.number, group)
        known |= fresh.keys()
        passed += len(logged) - len(fresh)
        for group in fresh.values():
            with _room(f"{added} groups were imported before"):
                client.xadd(keys.groups, {RECORD: encode(group)})
            added += 1
    return added, passed


def requeue_records(
    client: redis.Redis, run: str, ids: list[str]
) -> tuple[list[RefusedRecord], list[str]]:
    """Moves records from the quarantine back to the end of the streams that they came from: those of `ids`, or
    all if it is empty. Returns these records, and a line for each that stayed, with the reason. Raises
    ConfigError for an id that is not in the quarantine, and BufferFull if Redis is full."""
    refused = list(inspect_state.quarantine(client, run))
    for id in ids:
        if id not in {record.id for record in refused}:
            raise ConfigError(f"{id}: not in the quarantine")
    chosen = [record for record in refused if record.id in ids or not ids]
    script = client.register_script(lua_scripts.REQUEUE)
    put_back, stayed = [], []
    for record in chosen:
        if reason := still_refused(record, Keys(run)):
            stayed.append(f"{record.id}: {reason}")
        else:
            with _room(f"{len(put_back)} records were put back before"):
                moved = script([Keys(run).quarantine, record.source], [record.id])
            if moved:
                put_back.append(record)
    return put_back, stayed


def still_refused(record: RefusedRecord, keys: Keys) -> str | None:
    """Returns why a record would be refused again, or None if it would not."""
    if not record.whole:
        return f"only {len(record.record)} of {record.nbytes} bytes were kept"
    try:
        if record.source in (keys.groups, keys.eval_groups):
            decode_group(record.record).validate()
        elif record.source in (keys.tickets, keys.eval_tickets):
            decode_ticket(record.record).validate()
        else:
            return f"{record.source} is no stream of this run"
    except RecordError as error:
        return str(error)
    return None


def purge_run(client: redis.Redis, run: str, what: What) -> int:
    """Deletes the quarantine, the committed groups, or every key of the run. Returns the number of entries or
    keys."""
    keys = Keys(run)
    if what == "quarantine":
        count: Any = client.xlen(keys.quarantine)
        client.delete(keys.quarantine)
    elif what == "groups":
        # The emptied stream stays, so that the next ids are above those that a learner has read.
        count = client.xtrim(keys.groups, maxlen=0, approximate=False)
    else:
        names: Any = client.smembers(keys.workers)
        count = client.delete(*keys.fixed, *map(keys.worker, names))
    return count


@contextmanager
def _room(so_far: str) -> Iterator[None]:
    """Raises BufferFull, with what was done before, if Redis refuses the write within."""
    try:
        yield
    except redis.ResponseError as error:
        if not refuses_writes(error):
            raise
        raise BufferFull(f"redis refuses writes: {error}; {so_far}") from error
