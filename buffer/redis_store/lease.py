"""The right to lead a run: one learner at a time, in Redis, by a lease with a fencing token.

    free, or its lease is over ──acquire──▶ held for LEASE_S ──renew, every RENEW_S──▶ held
                                              │ silent for LEASE_S, and another learner acquires it
                                              ▼
                                        every write of the first one is refused, for good

Each learner that acquires the run gets a higher token than all before. Each script by which a learner changes
the run compares its token with the newest one, atomically with the change (buffer/redis_store/lua_scripts.py,
GUARD). A learner that was suspended for longer than its lease can therefore change nothing once another has
followed it.

Redis takes tokens from its clock. If it is emptied and the clock steps back, the next learner gets a lower
token than the one before it. The lease decides then: while one learner has it, one with a higher token is
refused too.

A learner that restarts in the same directory does not wait for the end of the earlier lease. The directory's
lock was free, so that the earlier process has ended; if it had not, the token would still shut it out.
"""

import os
import socket
import time
from pathlib import Path

import msgspec

LEASE_S = 15.0
"""Seconds after the last renewal until another learner may acquire the run"""
RENEW_S = 3.0
"""Seconds between two renewals, and so the longest for which a run's description can be missing from Redis"""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The learner of a run, as it describes itself to other processes."""

    run_id: str
    place: str
    """Host, file system and directory; two learners with the same place share the directory's lock."""
    host: str
    pid: int
    since_s: float
    """Unix time at which the learner acquired the run"""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))
        return f"process {self.pid} on host {self.host}, since {since}"


def owner_of(run_id: str, directory: Path) -> Owner:
    """Returns the description of this process as the learner of the run in `directory`."""
    host, found = socket.gethostname(), directory.stat()
    return Owner(
        run_id=run_id,
        place=f"{host}:{found.st_dev}:{found.st_ino}",
        host=host,
        pid=os.getpid(),
        since_s=time.time(),
    )
