"""The right to lead a run: one learner at a time, in Redis, by a lease with a fencing token.

    free, or its lease is over ──acquire──▶ held for LEASE_S ──renew, every RENEW_S──▶ held
                                              │ silent for LEASE_S, and another learner acquires it
                                              ▼
                                        every write of the first one is refused, for good

The token of whoever acquires the run is above all tokens before. Each script by which a learner changes the
run compares its token with the newest one (buffer/redis_store/lua_scripts.py, GUARD), as one step with what it
changes: so a learner that was stopped for longer than its lease, and goes on, changes nothing any more.

Redis takes tokens from its clock. Should it be emptied and that clock step back, a learner that follows gets a
lower token than the one before it. Then the lease decides: a learner with a higher token than the newest is
refused as well while another one holds the lease.

A learner that restarts in the directory of the one before does not wait for the end of that one's lease. The
directory's lock was free, so that process has ended; and were it not so, the token would shut it out.
"""

import os
import socket
import time
from pathlib import Path

import msgspec

LEASE_S = 15.0
"""A learner that was silent for so long may be followed by another."""
RENEW_S = 3.0
"""The time between two renewals, and the longest that a run's lost description is missing."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The learner of a run, as others see it."""

    run_id: str
    place: str
    """Host, file system and directory: two learners of one place share the directory's lock."""
    host: str
    pid: int
    since_s: float
    """Unix time at which the learner acquired the run"""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"process {self.pid} on host {self.host}, since {since}"


def owner_of(run_id: str, directory: Path) -> Owner:
    """This process as the learner of the run in `directory`."""
    host, found = socket.gethostname(), directory.stat()
    return Owner(
        run_id=run_id,
        place=f"{host}:{found.st_dev}:{found.st_ino}",
        host=host,
        pid=os.getpid(),
        since_s=time.time(),
    )
