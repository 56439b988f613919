"""Every Redis key of a run, with its lifetime and the reason for it.

The hash tag `{areal-q:RUN}` puts all keys of a run into one cluster slot, so that a script may touch several.
"""

from dataclasses import dataclass

WORKERS_GROUP = "workers"
"""The consumer group on both ticket streams."""
RELEASED = "released"
"""A consumer that no worker is: owner of the tickets that were handed back."""
RELEASED_IDLE_MS = 365 * 24 * 3600 * 1000
"""Idle time given to a released ticket: above every claim timeout, so that it can be claimed at once."""
RECORD = b"record"
"""The one field of a stream entry: a msgpack record of areal_q.messages."""
WORKER_TTL_S = 10
"""A heartbeat comes every second; after ten missed ones the worker no longer counts."""
QUARANTINE_LENGTH = 100
"""Records kept for a person to look at, and to put back; older ones go."""
QUARANTINE_BYTES = 64 << 20
"""Most bytes of all records in the quarantine, so that a flood does not fill Redis. Older ones go, but for
the last."""
QUARANTINE_RECORD_BYTES = 16 << 20
"""Most bytes of a record that is kept whole. Of a longer one only the start is kept; it cannot be put
back."""
QUARANTINE_START_BYTES = 64 << 10


@dataclass(frozen=True)
class Keys:
    """Key names of run `run`. No key but `worker` expires: they are the run's state, needed for a resume."""

    run: str

    @property
    def tag(self) -> str:
        return f"{{areal-q:{self.run}}}"

    @property
    def info(self) -> str:
        """Hash: `config` (TOML), `endpoints` (JSON), `run_id`, `settings`, a hash that changes with whatever a
        worker is set up from, and `finished` once the last step is done."""
        return f"{self.tag}:run"

    @property
    def owner(self) -> str:
        """Hash: the learner of the run (buffer/redis_store/lease.py), its fencing `token`, and `until`, the
        end of its lease in Unix milliseconds of Redis's clock. The token outlasts the lease, so nothing here
        expires."""
        return f"{self.tag}:owner"

    @property
    def tickets(self) -> str:
        """Stream of open training tickets; an entry goes when its group is committed."""
        return f"{self.tag}:tickets"

    @property
    def eval_tickets(self) -> str:
        """Stream of open evaluation tickets; workers look here first."""
        return f"{self.tag}:eval-tickets"

    @property
    def partials(self) -> str:
        """Hash from `STREAM:ENTRY` of a ticket that was handed back to what had been drawn of it; a field goes
        with its ticket."""
        return f"{self.tag}:partials"

    @property
    def groups(self) -> str:
        """Stream of committed groups; trimmed once a checkpoint and the trajectory log cover them."""
        return f"{self.tag}:groups"

    @property
    def eval_groups(self) -> str:
        """Stream of evaluation answers; an entry goes when the learner has read it."""
        return f"{self.tag}:eval-groups"

    @property
    def cursor(self) -> str:
        """Number of the next training ticket, as text."""
        return f"{self.tag}:cursor"

    @property
    def admission(self) -> str:
        """Name of the last admission, so that one repeated after a lost answer does nothing."""
        return f"{self.tag}:admission"

    @property
    def quarantine(self) -> str:
        """Stream of refused records: `source` stream, `id` there, `reason`, `record`, and `bytes`, which is
        more than the record has where only its start is kept."""
        return f"{self.tag}:quarantine"

    @property
    def set_aside(self) -> str:
        """Number of records that ever went to the quarantine, as text."""
        return f"{self.tag}:set-aside"

    @property
    def workers(self) -> str:
        """Set of the names of workers that have sent a heartbeat and were not yet seen to be silent."""
        return f"{self.tag}:workers"

    def worker(self, name: str) -> str:
        """A worker's last heartbeat; expires after WORKER_TTL_S."""
        return f"{self.tag}:worker:{name}"

    @property
    def fixed(self) -> list[str]:
        """All but the heartbeats."""
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
