"""Every Redis key of a run, with its lifetime and the reason for it.

The hash tag `{areal-q:RUN}` puts all keys of a run into one cluster slot, so that a script may touch several.
"""

from dataclasses import dataclass
from functools import cached_property

WORKERS_GROUP = "workers"
"""The consumer group on both ticket streams."""
RELEASED = "released"
"""Consumer that owns the tickets that workers gave back; no worker has this name."""
RELEASED_IDLE_MS = 365 * 24 * 3600 * 1000
"""Idle time of a released ticket. It is above every claim timeout, so that the ticket can be claimed at
once."""
RECORD = b"record"
"""The only field of a stream entry, a msgpack record of areal_q.messages"""
WORKER_TTL_S = 10
"""Seconds after which a worker without heartbeats counts as gone; it sends one every second."""
QUARANTINE_LENGTH = 100
"""Most records in the quarantine, where an operator can inspect them and put them back; older ones are
deleted."""
QUARANTINE_BYTES = 64 << 20
"""Most bytes of all records in the quarantine, so that many of them cannot fill Redis. Older ones are deleted;
the newest is always kept."""
QUARANTINE_RECORD_BYTES = 16 << 20
"""Most bytes of a record that is kept whole. Of a longer one only the beginning is kept, so that it cannot be
put back."""
QUARANTINE_START_BYTES = 64 << 10


@dataclass(frozen=True)
class Keys:
    """The names of a run's keys. Only `worker` expires; the others are the state from which a run is
    resumed."""

    run: str

    @cached_property
    def tag(self) -> str:
        return f"{{areal-q:{self.run}}}"

    @cached_property
    def info(self) -> str:
        """Hash with `config` (TOML), `endpoints` (JSON), `run_id`, `settings` (a hash of all that a worker is
        set up from), and `finished` once the last step is done."""
        return f"{self.tag}:run"

    @cached_property
    def owner(self) -> str:
        """Hash with the learner of the run (buffer/redis_store/lease.py), its fencing `token`, and `until`, the
        end of its lease in Unix milliseconds of Redis's clock. It never expires, since the token is needed
        after the lease."""
        return f"{self.tag}:owner"

    @cached_property
    def tickets(self) -> str:
        """Stream of open training tickets; an entry is deleted when its group is committed."""
        return f"{self.tag}:tickets"

    @cached_property
    def eval_tickets(self) -> str:
        """Stream of open evaluation tickets, which workers claim first."""
        return f"{self.tag}:eval-tickets"

    @cached_property
    def partials(self) -> str:
        """Hash from `STREAM:ENTRY` of a ticket that a worker gave back to the responses drawn so far. A field
        is deleted with its ticket."""
        return f"{self.tag}:partials"

    @cached_property
    def groups(self) -> str:
        """Stream of committed groups; they are deleted once a checkpoint and the trajectory log cover them."""
        return f"{self.tag}:groups"

    @cached_property
    def eval_groups(self) -> str:
        """Stream of committed evaluation groups; an entry is deleted when the learner has read it."""
        return f"{self.tag}:eval-groups"

    @cached_property
    def cursor(self) -> str:
        """Number of the next training ticket, as text."""
        return f"{self.tag}:cursor"

    @cached_property
    def admission(self) -> str:
        """Name of the last admission, by which one that is repeated after a lost answer does nothing."""
        return f"{self.tag}:admission"

    @cached_property
    def quarantine(self) -> str:
        """Stream of refused records with the fields `source` (the stream), `id` in it, `reason`, `record`, and
        `bytes`, the size of the whole record, of which `record` may be only the beginning."""
        return f"{self.tag}:quarantine"

    @cached_property
    def set_aside(self) -> str:
        """Number of records that were ever moved to the quarantine, as text."""
        return f"{self.tag}:set-aside"

    @cached_property
    def workers(self) -> str:
        """Set of the names of workers that have sent a heartbeat; the learner removes those that fell
        silent."""
        return f"{self.tag}:workers"

    def worker(self, name: str | bytes) -> bytes:
        """Key of a worker's last heartbeat, which expires after WORKER_TTL_S. A name that Redis returns is
        bytes, and need not be text: anybody may have put it there."""
        return f"{self.tag}:worker:".encode() + (name.encode() if isinstance(name, str) else name)

    @cached_property
    def fixed(self) -> list[str]:
        """All keys except the workers' heartbeats."""
        return [
            self.info,
            self.owner,
            self.tickets,
            self.eval_tickets,
            self.partials,
            self.groups,
            self.eval_groups,
            self.cursor,
            self.admission,
            self.quarantine,
            self.set_aside,
            self.workers,
        ]
