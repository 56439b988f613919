"""The learner's side of the Redis buffer; buffer/redis_store/__init__.py has an overview."""

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import redis
from msgspec.structs import replace

from areal_q.errors import BufferFull, ConfigError, RecordError
from areal_q.messages import (
    LONGEST_NAME,
    Group,
    Ticket,
    WorkerStatus,
    decode_status,
    decode_ticket,
    encode,
)
from buffer.interface import START, Claims, Entry, Memory
from buffer.redis_store.connection import PATIENCE_S, refuses_writes
from buffer.redis_store.keys import WORKER_TTL_S, WORKERS_GROUP, Keys
from buffer.redis_store.lease import LeasedConnection, Owner
from buffer.redis_store.streams import GroupStream, behind, records

logger = logging.getLogger(__name__)


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
        self.run_id = ""
        self.checks: list[Callable[[Group], None]] = []
        """Functions that are called with each valid group and raise RecordError for one that is not of this
        run, or does not fit the model"""
        self.trimmed = START
        """The position in the stream of groups up to which `trim` deleted them"""
        self.refused_heartbeats = 0
        """Number of heartbeats that could not be read when `workers` last looked"""
        self._heard: dict[bytes, tuple[bytes, float]] = {}
        """Each worker's heartbeat, and the monotonic time at which `workers` first read it"""
        self._connection = LeasedConnection(url, self.keys, patience_s, stop)
        self._redis, self._call = self._connection.redis, self._connection.call
        self._change = self._connection.change
        self._groups = GroupStream(self._connection, self.keys.groups, self._fits)
        self._eval_groups = GroupStream(self._connection, self.keys.eval_groups, self._fits)

    @property
    def position(self) -> str:
        """Id of the last entry that was read from the groups stream. A resumed learner sets it to the position
        in its checkpoint."""
        return self._groups.position

    @position.setter
    def position(self, position: str) -> None:
        self._groups.position = position

    def acquire(self, owner: Owner, stop: threading.Event | None = None) -> None:
        """Makes this process the learner of the run until `close`, also of a run that was finished. Waits for
        the end of the lease of a learner that is gone. Raises ConfigError if Redis may delete what the run
        keeps there, RunTaken if another learner is at work, and Stopped if `stop` is set meanwhile."""
        if (memory := self.memory()).evicts:
            raise ConfigError(
                f"redis would delete groups and tickets at its limit of {memory.limit >> 20} MiB: its "
                f"maxmemory-policy is {memory.policy}; CONFIG SET maxmemory-policy noeviction"
            )
        self._connection.acquire(owner, stop)
        self.run_id = owner.run_id

    def publish_run(self, config_toml: str, endpoints: dict[str, str], settings: str = "") -> None:
        """Publishes the run's settings and the endpoints of the weight server to the workers. `settings` is a
        hash of all that workers are set up from."""
        fields = {
            "config": config_toml,
            "endpoints": msgspec.json.encode(endpoints),
            "run_id": self.run_id,
            "settings": settings,
        }
        self._connection.info = [part for pair in fields.items() for part in pair]
        streams = [self.keys.tickets, self.keys.eval_tickets]
        self._change("CREATE_GROUPS", streams, [WORKERS_GROUP])
        self._change("PUBLISH", [self.keys.info], self._connection.info)

    def finish(self) -> None:
        """Marks the run as finished for the workers, until a learner acquires it again."""
        self._change("PUBLISH", [self.keys.info], ["finished", "1"])

    def published_id(self) -> str:
        """Returns the id of the run whose state is in Redis; "" if there is no state, or the run has no id."""
        found: Any = self._call(lambda: self._redis.hget(self.keys.info, "run_id"))
        return (found or b"").decode(errors="replace")

    def admit(self, tickets: list[Ticket], cursor: int) -> None:
        """Adds tickets and sets the cursor, the number of the next ticket, both or neither. Raises BufferFull
        if there is no room for them."""
        self._admit_to(self.keys.tickets, tickets, [self.keys.cursor], cursor)

    def admit_eval(self, tickets: list[Ticket]) -> None:
        self._admit_to(self.keys.eval_tickets, tickets)

    def _admit_to(
        self, stream: str, tickets: list[Ticket], cursor_key: Sequence[str] = (), cursor: int = 0
    ) -> None:
        keys = [stream, self.keys.partials, self.keys.admission, *cursor_key]
        args = [uuid.uuid4().hex, cursor, *map(encode, tickets)]
        try:
            self._change("ADMIT", keys, args, disk=False)
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            raise BufferFull(f"redis refuses writes: {error}") from error

    def readmit(self, version: int) -> int:
        """Replaces all open training tickets of steps after `version` by equal ones of step `version`, and
        returns their number. A worker that has claimed one of them loses it, so that it becomes at most one
        group."""
        ahead = [
            (entry, encode(replace(ticket, step=version)))
            for entry, ticket in self._open(self.keys.tickets)
            if ticket.step > version
        ]
        return self._exchange(self.keys.tickets, ahead)

    def drop_eval(self) -> int:
        """Withdraws the open evaluation tickets and returns their number."""
        entries = [(entry, b"") for entry, _ in self._open(self.keys.eval_tickets)]
        return self._exchange(self.keys.eval_tickets, entries)

    def open_eval(self) -> Counter[int]:
        """Returns how many evaluation tickets of each version can still become a group."""
        return Counter(ticket.step for _, ticket in self._open(self.keys.eval_tickets))

    def _exchange(self, stream: str, entries: list[tuple[bytes, bytes]]) -> int:
        if not entries:
            return 0
        keys = [stream, self.keys.partials]
        args = [WORKERS_GROUP, *(part for pair in entries for part in pair)]
        return int(self._change("READMIT", keys, args))

    def cursor(self) -> int | None:
        """Returns the cursor that the last admission set; None if nothing of this run was ever admitted."""
        value: Any = self._call(lambda: self._redis.get(self.keys.cursor))
        return None if value is None else int(value)

    def open_tickets(self) -> set[int]:
        """Returns the numbers of the training tickets that have no committed group yet. A ticket that cannot be
        decoded is left out; the worker that claims it moves it to the quarantine."""
        return {ticket.number for _, ticket in self._open(self.keys.tickets)}

    def _open(self, stream: str) -> Iterator[tuple[bytes, Ticket]]:
        return records(self._connection, stream, START, decode_ticket)

    def unread(self) -> list[int]:
        """Returns the ticket numbers of the committed groups after `position`."""
        return self._groups.unread()

    def drawn(self) -> list[tuple[int, int, str]]:
        """Returns (number, problem, why) of the open training tickets and of those of the committed groups
        after `position`, as an order that remembers put them there."""
        tickets = (ticket for _, ticket in self._open(self.keys.tickets))
        return [*((t.number, t.problem, t.why) for t in tickets), *self._groups.drawn()]

    def read(self, count: int, timeout_s: float) -> list[Entry]:
        """Returns the next groups after `position`, in order, and moves `position` behind them: `count` of
        them, or fewer if no more come within `timeout_s`."""
        return self._groups.read(count, timeout_s)

    def take(self, count: int, timeout_s: float) -> list[Group]:
        """Returns the same groups as `read`, without their entries."""
        return [entry.group for entry in self.read(count, timeout_s)]

    def take_eval(self) -> list[Group]:
        """Returns the evaluation groups that were committed since the last call, without waiting."""
        return self._eval_groups.drain()

    def trim(self, position: str) -> None:
        """Deletes the groups up to and including `position`, which must be in a checkpoint and in the
        trajectory log by then. Deletes nothing if the ids have begun again since (`rewind`)."""
        if behind(self.position, position):
            return
        self._change("TRIM", [self.keys.groups], [position])
        self.trimmed = position

    def memory(self) -> Memory:
        found: Any = self._call(lambda: self._redis.info("memory"))
        policy = str(found.get("maxmemory_policy", "noeviction"))
        return Memory(int(found["used_memory"]), int(found.get("maxmemory", 0)), policy)

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
            name = consumer["name"].decode(errors="replace").rpartition("-")[0]
            if name:  # tickets that were given back belong to no worker
                by_worker[name] = by_worker.get(name, 0) + consumer["pending"]
        return Claims(count, by_worker)

    def starves(self, sentence: str) -> None:
        """Publishes a sentence on why the learner gets no groups, for `areal-q status`. "" withdraws it."""
        self._change("PUBLISH", [self.keys.owner], ["starves", sentence])

    def unread_digests(self) -> dict[int, str]:
        """Returns the digest of each version that drew groups after `position`."""
        return self._groups.digests()

    def now_s(self) -> float:
        """Returns the Unix time by the clock that gives entries their ids, for comparison with
        `committed_s`."""
        seconds, micros = self._call(self._redis.time)  # pyright: ignore
        return seconds + micros / 1e6

    def rewind(self) -> bool:
        """Sets `position` to START and returns True if the groups' ids have begun again below those that were
        read: the buffer has come back without its last entries and with a clock that is behind, or a foreign
        entry had an id after which there is none."""
        self._eval_groups.rewind()
        return self._groups.rewind()

    def quarantined_total(self) -> int:
        """Returns how many records have been moved to the quarantine since the run began, by anybody."""
        return int(self._call(lambda: self._redis.get(self.keys.set_aside)) or 0)  # pyright: ignore

    def workers(self) -> list[WorkerStatus]:
        """Returns the workers that sent a heartbeat lately, in the order of their names. One that stayed the
        same for WORKER_TTL_S is a silent worker's; its key lives on where Redis's clock stepped back."""
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        if not names:
            return []
        names = sorted(names)
        beats: Any = self._call(lambda: self._redis.mget([*map(self.keys.worker, names)]))
        silent = [name for name, beat in zip(names, beats, strict=True) if beat is None]
        if silent:  # a worker that sends a heartbeat again adds itself
            self._call(lambda: self._redis.srem(self.keys.workers, *silent))
        now_s, before = time.monotonic(), self._heard
        found = {name: beat for name, beat in zip(names, beats, strict=True) if beat is not None}
        self._heard = {
            name: before[name] if name in before and before[name][0] == beat else (beat, now_s)
            for name, beat in found.items()
        }
        lately = [n for n, (_, since_s) in self._heard.items() if now_s - since_s <= WORKER_TTL_S]
        statuses, refused = read_heartbeats(lately, [found[name] for name in lately])
        if refused and not self.refused_heartbeats:
            logger.warning("%s", refused[0])
        self.refused_heartbeats = len(refused)
        return statuses

    def forget(self) -> None:
        """Deletes every key of the run except the one that names its learner."""
        names: Any = self._call(lambda: self._redis.smembers(self.keys.workers))
        beats: Any = map(self.keys.worker, names)
        state = [key for key in self.keys.fixed if key != self.keys.owner]
        self._change("FORGET", [*state, *beats], [])

    def close(self) -> None:
        self._connection.close()

    def _fits(self, group: Group) -> None:
        found = group.ticket.run_id
        if found and self.run_id and found != self.run_id:
            raise RecordError(f"group of ticket {group.ticket.number}: of run {found}")
        for check in self.checks:
            check(group)


def read_heartbeats(
    names: list[bytes], beats: list[bytes | None]
) -> tuple[list[WorkerStatus], list[str]]:
    """Returns the heartbeats of the workers `names`, without the silent ones, whose heartbeat is None, and a
    sentence for each that cannot be read."""
    statuses, refused = [], []
    for name, beat in zip(names, beats, strict=True):
        try:
            statuses += [] if beat is None else [decode_status(beat)]
        except RecordError as error:
            told = name[:LONGEST_NAME].decode(errors="replace")
            refused.append(f"heartbeat of worker {told} ignored: {error}")
    return statuses, refused
