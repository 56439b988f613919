"""The learner's side of the Redis buffer; buffer/redis_store/__init__.py has an overview."""

import functools
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import redis
from msgspec.structs import replace

from areal_q.errors import BufferFull, BufferGone, RecordError, RunTaken, Stopped
from areal_q.messages import (
    Group,
    MessageDecoder,
    Ticket,
    VersionSpan,
    WorkerStatus,
    decode_group,
    decode_status,
    decode_ticket,
    encode,
)
from buffer.interface import START, Claims, Entry, Memory
from buffer.redis_store import lua_scripts
from buffer.redis_store.connection import (
    PATIENCE_S,
    Outage,
    Patience,
    connect,
    insist,
    refuses_writes,
)
from buffer.redis_store.keys import RECORD, WORKERS_GROUP, Keys
from buffer.redis_store.lease import LEASE_S, RENEW_S, Owner

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
READ_PAGE = 64
"""Most entries of one read, since each may have megabytes"""


class _TicketOf(msgspec.Struct):
    number: int


class _GroupOf(msgspec.Struct):
    """The part of a group's record that names its ticket, so that no arrays are copied."""

    ticket: _TicketOf


class _Drawn(msgspec.Struct):
    spans: list[VersionSpan]


class _SpansOf(msgspec.Struct):
    """The part of a group's record that names the weights that drew it."""

    trajectories: list[_Drawn]


_decode_spans: MessageDecoder[_SpansOf] = MessageDecoder(_SpansOf)
_decode_number: MessageDecoder[_TicketOf] = MessageDecoder(_TicketOf)
_decode_group_number: MessageDecoder[_GroupOf] = MessageDecoder(_GroupOf)


class LearnerBuffer:
    """The learner's side. A run has one learner: once `acquire` has returned, every write raises RunTaken if
    another learner has acquired the run since (buffer/redis_store/lease.py). Tools that are not learners write
    without acquiring it.

    `take` reads in stream order without deleting, so that a learner that resumes at a checkpoint's position
    gets the same groups again, in the same order, until `trim`
    (test_a_resumed_learner_takes_the_same_groups_again). `admit` is atomic and happens once, also if its answer
    is lost. An evaluation group is deleted after it was read; a learner that is killed in between reads it
    again. A record that is not valid goes to the quarantine, and its ticket has no group.

    While Redis does not answer, calls are repeated for `patience_s` and then raise BufferUnavailable. Once
    `stop` is set they are repeated for a few seconds and then raise BufferGone, as all later calls do at once.
    A full Redis refuses `admit` at once with BufferFull and admits nothing; only a checkpoint and `trim` make
    room.
    """

    def __init__(
        self,
        url: str,
        run: str,
        patience_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
    ) -> None:
        self.keys = Keys(run)
        self.position = START
        self.quarantined = 0
        self.check: Callable[[Group], None] = lambda group: None
        """Function that is called with each valid group and raises RecordError for one that does not fit the
        model"""
        self._url, self._patience_s, self._stop = url, patience_s, stop
        self._outage = Outage()
        self._redis = connect(url)
        self._eval_position = START
        self.run_id = ""
        self._owner: Owner | None = None
        self._token = ""
        self._info: list[Any] = []
        """Fields and values of the run's hash, as published"""
        self._taken: RunTaken | None = None
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._acquire = self._redis.register_script(lua_scripts.ACQUIRE)
        self._scripts = {
            name: self._redis.register_script(lua_scripts.GUARD + getattr(lua_scripts, name))
            for name in (
                "ADMIT", "CREATE_GROUPS", "FORGET", "PUBLISH", "QUARANTINE", "READMIT", "REMOVE",
                "RENEW_LEASE", "TRIM",
            )
        }  # fmt: skip

    def acquire(self, owner: Owner, stop: threading.Event | None = None) -> None:
        """Makes this process the learner of the run until `close`, also of a run that was finished. Waits for
        the end of the lease of a learner that is gone. Raises RunTaken if another learner is at work, and
        Stopped if `stop` is set meanwhile."""
        args = [owner.run_id, owner.place, msgspec.json.encode(owner), round(LEASE_S * 1000)]
        keys = [self.keys.owner, self.keys.info]
        first = self._call(lambda: self._acquire(keys, args))
        answer: Any = first
        while answer[0] == b"0":
            if answer[1:] != first[1:]:  # pyright: ignore
                raise _taken(self.keys.run, answer[1], "choose another name, or stop that learner")
            if answer is first:
                logger.info("run %s: waits for the end of another learner's lease", self.keys.run)
            if (stop or self._closing).wait(0.2):
                raise Stopped("while another learner's lease went on")
            answer = self._call(lambda: self._acquire(keys, args))
        self._token, self._owner, self.run_id = answer[0], owner, owner.run_id
        self._keeper.start()

    def _keep(self) -> None:
        """Renews the lease on its own thread, and writes the run's description again if Redis lost it."""
        renewed = True
        while not self._closing.wait(RENEW_S):
            try:
                if self._renew(LEASE_S):
                    logger.warning("redis had lost the description of the run: published again")
                renewed = True
            except RunTaken as error:
                self._taken = error
                return
            except redis.RedisError as error:
                if renewed:
                    logger.warning("the lease of the run is not renewed: %s", error)
                renewed = False

    def _renew(self, seconds: float) -> bool:
        assert self._owner
        owner = self._owner
        args = [owner.run_id, owner.place, msgspec.json.encode(owner), round(seconds * 1000)]
        keys = [self.keys.owner, self.keys.info]
        return bool(self._guarded("RENEW_LEASE", keys, [*args, *self._info]))

    def _guarded(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Runs a script that changes the run. Raises RunTaken if another learner has acquired the run."""
        try:
            mine = (self._owner.run_id, self._owner.place) if self._owner else ("", "")
            return self._scripts[name]([self.keys.owner, *keys], [self._token, *mine, *args])
        except redis.ResponseError as error:
            code, _, record = str(error).partition(" ")
            if code != "FENCED":
                raise
            advice = "this one has changed nothing since then"
            raise _taken(self.keys.run, record.encode(), advice) from error

    def publish_run(self, config_toml: str, endpoints: dict[str, str], settings: str = "") -> None:
        fields = {
            "config": config_toml,
            "endpoints": msgspec.json.encode(endpoints),
            "run_id": self.run_id,
            "settings": settings,
        }
        self._info = [part for pair in fields.items() for part in pair]
        streams = [self.keys.tickets, self.keys.eval_tickets]
        self._call(lambda: self._guarded("CREATE_GROUPS", streams, [WORKERS_GROUP]))
        self._call(lambda: self._guarded("PUBLISH", [self.keys.info], self._info))

    def finish(self) -> None:
        """Marks the run as finished for the workers, until a learner acquires it again."""
        self._call(lambda: self._guarded("PUBLISH", [self.keys.info], ["finished", "1"]))

    def published_id(self) -> str:
        """Returns the id of the run whose state is in Redis; "" if there is no state, or the run has no id."""
        found: Any = self._call(lambda: self._redis.hget(self.keys.info, "run_id"))
        return (found or b"").decode()

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        self._admit_to([self.keys.tickets, self.keys.admission, self.keys.cursor], tickets, cursor)

    def admit_eval(self, tickets: list[Ticket]) -> None:
        self._admit_to([self.keys.eval_tickets, self.keys.admission], tickets, 0)

    def _admit_to(self, keys: list[str], tickets: list[Ticket], cursor: int) -> None:
        args = [uuid.uuid4().hex, cursor, *map(encode, tickets)]
        self._write(lambda: self._guarded("ADMIT", keys, args))

    def readmit(self, version: int) -> int:
        ahead = [
            (entry, encode(replace(ticket, step=version)))
            for entry, ticket in self._open(self.keys.tickets)
            if ticket.step > version
        ]
        return self._exchange(self.keys.tickets, ahead)

    def drop_eval(self) -> int:
        entries = [(entry, b"") for entry, _ in self._open(self.keys.eval_tickets)]
        return self._exchange(self.keys.eval_tickets, entries)

    def open_eval(self) -> Counter[int]:
        return Counter(ticket.step for _, ticket in self._open(self.keys.eval_tickets))

    def _exchange(self, stream: str, entries: list[tuple[bytes, bytes]]) -> int:
        if not entries:
            return 0
        keys = [stream, self.keys.partials]
        args = [WORKERS_GROUP, *(part for pair in entries for part in pair)]
        return int(self._call(lambda: self._guarded("READMIT", keys, args)))

    def cursor(self) -> int | None:
        value: Any = self._call(lambda: self._redis.get(self.keys.cursor))
        return None if value is None else int(value)

    def open_tickets(self) -> set[int]:
        """Returns the numbers as LearnerSide says. A ticket that cannot be decoded is left out; the worker that
        claims it moves it to the quarantine."""
        return set(self._numbers(self.keys.tickets, START, lambda r: _decode_number(r).number))

    def unread(self) -> list[int]:
        return list(
            self._numbers(
                self.keys.groups, self.position, lambda r: _decode_group_number(r).ticket.number
            )
        )

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        out: list[Entry] = []
        deadline = time.monotonic() + timeout_s
        while len(out) < count:
            left_s = max(0.0, deadline - time.monotonic())
            entries = self._read(count - len(out), left_s)
            for entry, fields in entries:
                group = self._decoded(self.keys.groups, entry, fields)
                if group:
                    out.append(Entry(entry.decode(), group, len(fields[RECORD])))
                self.position = entry.decode()
            if not entries and left_s == 0:
                break
        return out

    def take(self, count: int, timeout_s: float) -> list[Group]:
        return [entry.group for entry in self.read(count, timeout_s)]

    def take_eval(self) -> list[Group]:
        groups = []
        for entry, fields in self._pages(self.keys.eval_groups, self._eval_position):
            group = self._decoded(self.keys.eval_groups, entry, fields)
            if group:
                groups.append(group)
            # With the position, this learner reads no group twice even if XDEL fails.
            self._eval_position = entry.decode()
            self._call(functools.partial(self._guarded, "REMOVE", [self.keys.eval_groups], [entry]))
        return groups

    def trim(self, position: str) -> None:
        ms, _, sequence = position.partition("-")
        following = f"{ms}-{int(sequence) + 1}"
        self._call(lambda: self._guarded("TRIM", [self.keys.groups], [following]))

    def memory(self) -> Memory:
        found: Any = self._call(lambda: self._redis.info("memory"))
        return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)))

    def claims(self) -> Claims:
        count: Any = self._call(lambda: self._redis.xlen(self.keys.tickets))
        try:
            found: Any = self._call(lambda: self._redis.xpending(self.keys.tickets, WORKERS_GROUP))
        except redis.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return Claims(count, {})
        by_worker: dict[str, int] = {}
        for consumer in found["consumers"]:
            name = consumer["name"].decode().rpartition("-")[0]
            if name:  # tickets that were given back belong to no worker
                by_worker[name] = by_worker.get(name, 0) + consumer["pending"]
        return Claims(count, by_worker)

    def starves(self, sentence: str) -> None:
        self._call(lambda: self._guarded("PUBLISH", [self.keys.owner], ["starves", sentence]))

    def unread_digests(self) -> dict[int, str]:
        """Returns the digest of each version that drew groups after `position`; where they differ, the one in
        the newest group."""
        found: dict[int, str] = {}
        for _, fields in self._pages(self.keys.groups, self.position):
            with suppress(RecordError):
                for drawn in _decode_spans(fields.get(RECORD, b"")).trajectories:
                    found.update((span.version, span.digest) for span in drawn.spans)
        return found

    def now_s(self) -> float:
        seconds, micros = self._call(self._redis.time)  # pyright: ignore
        return seconds + micros / 1e6

    def rewind(self) -> bool:
        if _behind(self._last_id(self.keys.eval_groups), self._eval_position):
            self._eval_position = START
        if not _behind(self._last_id(self.keys.groups), self.position):
            return False
        self.position = START
        return True

    def _last_id(self, stream: str) -> str:
        """Returns the newest id that `stream` ever gave to an entry."""
        try:
            found: Any = self._call(lambda: self._redis.xinfo_stream(stream))
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return START
        return found["last-generated-id"].decode()

    def set_aside(self) -> int:
        return int(self._call(lambda: self._redis.get(self.keys.set_aside)) or 0)  # pyright: ignore

    def workers(self) -> list[WorkerStatus]:
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        if not names:
            return []
        names = sorted(names)
        beats: Any = self._call(
            lambda: self._redis.mget([self.keys.worker(name.decode()) for name in names])
        )
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        if silent:  # a worker that sends a heartbeat again adds itself
            self._call(lambda: self._redis.srem(self.keys.workers, *silent))
        return [status for beat in beats if beat is not None for status in _statuses(beat)]

    def forget(self) -> None:
        """Deletes every key of the run except the one that names its learner."""
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        beats = [self.keys.worker(name.decode()) for name in names]
        state = [key for key in self.keys.fixed if key != self.keys.owner]
        self._call(lambda: self._guarded("FORGET", [*state, *beats], []))

    def close(self) -> None:
        """Gives up the lease, so that the next learner need not wait for its end."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
            with suppress(redis.RedisError, RunTaken):
                self._renew(0.0)
        self._redis.close()

    def _read(self, count: int, wait_s: float) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Returns up to `count` entries after `position`; waits up to `wait_s` (in slices of 1 s) for the
        first."""
        block_ms = min(1000, round(wait_s * 1000)) or None
        streams: dict[Any, Any] = {self.keys.groups: self.position}
        reply: Any = self._call(lambda: self._redis.xread(streams, min(count, READ_PAGE), block_ms))
        return reply[0][1] if reply else []

    def _pages(self, stream: str, after: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        while True:
            start = f"({after}"
            page: Any = self._call(
                functools.partial(self._redis.xrange, stream, min=start, count=READ_PAGE)
            )
            yield from page
            if len(page) < READ_PAGE:
                return
            after = page[-1][0].decode()

    def _open(self, stream: str) -> Iterator[tuple[bytes, Ticket]]:
        """Yields (entry id, ticket) of `stream`. A ticket that cannot be decoded is left to the workers."""
        for entry, fields in self._pages(stream, START):
            try:
                yield entry, decode_ticket(fields.get(RECORD, b""))
            except RecordError as error:
                logger.warning("%s %s: %s", stream, entry.decode(), error)

    def _numbers(self, stream: str, after: str, number: Callable[[bytes], int]) -> Iterator[int]:
        for entry, fields in self._pages(stream, after):
            try:
                yield number(fields.get(RECORD, b""))
            except RecordError as error:
                logger.warning("%s %s: %s", stream, entry.decode(), error)

    def _decoded(self, stream: str, entry: bytes, fields: dict[bytes, bytes]) -> Group | None:
        """Returns the entry's group, or None if it is not valid; it is then moved to the quarantine."""
        try:
            group = decode_group(fields.get(RECORD, b"")).validate()
            self._check_id(group)
            self.check(group)
            return group
        except RecordError as error:
            logger.warning("%s %s goes to the quarantine: %s", stream, entry.decode(), error)
            keys = [stream, self.keys.quarantine, self.keys.set_aside]
            args = [entry, str(error), ""]
            self._call(lambda: self._guarded("QUARANTINE", keys, args))
            self.quarantined += 1
            return None

    def _check_id(self, group: Group) -> None:
        found = group.ticket.run_id
        if found and self.run_id and found != self.run_id:
            raise RecordError(f"group of ticket {group.ticket.number}: of run {found}")

    def _call(self, call: Callable[[], _T]) -> _T:
        if self._taken:
            raise self._taken
        return self._insist(call, disk=True)

    def _insist(self, call: Callable[[], _T], disk: bool) -> _T:
        patience = Patience(self._url, self._patience_s, self._outage, self._stop)
        try:
            return insist(patience, call, disk=disk)
        except BufferGone:
            self._patience_s = 0.0
            raise

    def _write(self, call: Callable[[], _T]) -> _T:
        try:
            return self._insist(call, disk=False)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            raise BufferFull(f"redis refuses writes: {error}") from error


def _taken(run: str, record: bytes, advice: str) -> RunTaken:
    who = f", {msgspec.json.decode(record, type=Owner)}" if record else ""
    return RunTaken(f"run {run} has another learner{who}: {advice}")


def _behind(one: str, other: str) -> bool:
    """Returns True if the first of two stream ids is the smaller one."""
    first, second = (tuple(map(int, id.split("-"))) for id in (one, other))
    return first < second


def _statuses(beat: bytes) -> list[WorkerStatus]:
    try:
        return [decode_status(beat)]
    except RecordError as error:
        logger.warning("heartbeat ignored: %s", error)
        return []
