"""The streams of a run as its learner reads them: page by page, and each group once, in order."""

import functools
import logging
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import redis

from areal_q.errors import RecordError
from areal_q.messages import Group, MessageDecoder, VersionSpan, decode_group
from buffer.interface import END, START, Entry
from buffer.redis_store.keys import RECORD
from buffer.redis_store.lease import LeasedConnection

_T = TypeVar("_T")
_Fields = dict[bytes, bytes]
logger = logging.getLogger(__name__)
READ_PAGE = 64
"""Most entries of one read"""
PAGE_BYTES = 1_000_000
"""Bytes of groups that one read asks for. For much larger answers Redis takes fresh memory each time, and each
byte costs it several times as much."""

MOST_REASON = 1000
"""Most characters that are kept of why a record was refused, which may quote the record"""


class _TicketOf(msgspec.Struct):
    number: int
    problem: int = -1
    why: str = ""


class _GroupOf(msgspec.Struct):
    """The part of a group's record that names its ticket and problem, so that no arrays are copied."""

    ticket: _TicketOf


class _Drawn(msgspec.Struct):
    spans: list[VersionSpan]
    branches: "tuple[_Drawn, ...]" = ()


class _SpansOf(msgspec.Struct):
    """The part of a group's record that names the weights that drew it."""

    trajectories: list[_Drawn]


_decode_spans: MessageDecoder[_SpansOf] = MessageDecoder(_SpansOf)
_decode_group_number: MessageDecoder[_GroupOf] = MessageDecoder(_GroupOf)


def pages(
    client: redis.Redis, stream: str, after: str = START, call: Callable[..., Any] = operator.call
) -> Iterator[tuple[bytes, _Fields]]:
    """Yields (entry id, fields) of `stream`; `call` makes each read of READ_PAGE entries, and may repeat it."""
    while after != END:
        page = call(functools.partial(client.xrange, stream, min=f"({after}", count=READ_PAGE))
        yield from page
        if len(page) < READ_PAGE:
            return
        after = page[-1][0].decode()


def records(
    connection: LeasedConnection, stream: str, after: str, decode: Callable[[bytes], _T]
) -> Iterator[tuple[bytes, _T]]:
    """Yields (entry id, decoded record). A record that cannot be decoded is left to whoever takes it."""
    for entry, fields in pages(connection.redis, stream, after, connection.call):
        try:
            yield entry, decode(fields.get(RECORD, b""))
        except RecordError as error:
            logger.warning("%s %s: %s", stream, entry.decode(), error)


def groups_of_a_page(nbytes: float) -> int:
    """Returns how many groups of `nbytes` bytes one read asks for."""
    return max(1, min(READ_PAGE, round(PAGE_BYTES / (nbytes + 1))))


class GroupStream:
    """A stream of groups, read in order from `position`. A group that cannot be decoded, is not valid, or for
    which `check` raises goes to the quarantine."""

    def __init__(
        self, connection: LeasedConnection, stream: str, check: Callable[[Group], None]
    ) -> None:
        self.position = START
        self._connection, self._stream, self._check = connection, stream, check
        self._page = 1
        """Groups that one read asks for, by the size of those that the last one brought"""

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        out: list[Entry] = []
        deadline = time.monotonic() + timeout_s
        while len(out) < count:
            left_s = max(0.0, deadline - time.monotonic())
            entries = self._read(count - len(out), left_s)
            for entry, fields in entries:
                group = self._decoded(entry, fields)
                if group:
                    out.append(Entry(entry.decode(), group, len(fields[RECORD])))
                self.position = entry.decode()
            if not entries and left_s == 0:
                break
        return out

    def _read(self, count: int, wait_s: float) -> list[tuple[bytes, _Fields]]:
        """Returns up to `count` entries after `position`; waits up to `wait_s` (in slices of 1 s) for the
        first."""
        block_ms = min(1000, round(wait_s * 1000)) or None
        streams: dict[Any, Any] = {self._stream: self.position}
        xread, count = self._connection.redis.xread, min(count, self._page)
        reply: Any = self._connection.call(lambda: xread(streams, count, block_ms))
        entries = reply[0][1] if reply else []
        if entries:
            nbytes = sum(len(fields.get(RECORD, b"")) for _, fields in entries)
            self._page = groups_of_a_page(nbytes / len(entries))
        return entries

    def drain(self) -> list[Group]:
        """Returns all groups after `position`, and deletes them."""
        groups, read = [], []
        leased = self._connection
        for entry, fields in pages(leased.redis, self._stream, self.position, leased.call):
            group = self._decoded(entry, fields)
            if group:
                groups.append(group)
            # With the position, this learner reads no group twice even if XDEL fails.
            self.position = entry.decode()
            read.append(entry)
        for first in range(0, len(read), READ_PAGE):
            self._connection.change("REMOVE", [self._stream], read[first : first + READ_PAGE])
        if read:
            self.rewind()
        return groups

    def unread(self) -> list[int]:
        found = records(self._connection, self._stream, self.position, _decode_group_number)
        return [group.ticket.number for _, group in found]

    def drawn(self) -> list[tuple[int, int, str]]:
        """Returns (number, problem, why) of the tickets of the groups after `position`."""
        found = records(self._connection, self._stream, self.position, _decode_group_number)
        return [(it.ticket.number, it.ticket.problem, it.ticket.why) for _, it in found]

    def digests(self) -> dict[int, str]:
        """Returns the digest of each version that drew groups after `position`; where they differ, the one in
        the newest group."""
        found = records(self._connection, self._stream, self.position, _decode_spans)
        drawn = (part for _, it in found for t in it.trajectories for part in (t, *t.branches))
        spans = (span for part in drawn for span in part.spans)
        return {span.version: span.digest for span in spans}

    def rewind(self) -> bool:
        """Sets `position` to START and returns True if the newest group is older than `position`, or gets
        another id since none can follow it."""
        anew = self._connection.change("ANEW", [self._stream], [])
        if not anew and not behind(self._last_id(), self.position):
            return False
        self.position = START
        return True

    def _last_id(self) -> str:
        """Returns the newest id that the stream ever gave to an entry."""
        try:
            client = self._connection.redis
            found: Any = self._connection.call(lambda: client.xinfo_stream(self._stream))
        except redis.ResponseError as error:
            if "no such key" not in str(error):
                raise
            return START
        return found["last-generated-id"].decode()

    def _decoded(self, entry: bytes, fields: _Fields) -> Group | None:
        """Returns the entry's group, or None if it is not valid; it is then moved to the quarantine."""
        try:
            group = decode_group(fields.get(RECORD, b"")).validate()
            self._check(group)
            return group
        except Exception as error:
            # Of any type: the entry stays in Redis, and so would end every learner that resumes the run.
            foreseen = isinstance(error, RecordError)
            reason = str(error) if foreseen else f"{type(error).__name__}: {error}"
            reason = reason[:MOST_REASON]
            logger.warning(
                "%s %s goes to the quarantine: %s",
                self._stream,
                entry.decode(),
                reason,
                exc_info=not foreseen,
            )
            all = self._connection.keys
            keys = [self._stream, all.quarantine, all.set_aside]
            self._connection.change("QUARANTINE", keys, [entry, reason, ""])
            return None


def behind(one: str, other: str) -> bool:
    """Returns True if the first of two stream ids is the smaller one."""
    first, second = (tuple(map(int, id.split("-"))) for id in (one, other))
    return first < second
