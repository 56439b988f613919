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

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import redis

from areal_q.errors import BufferGone, RunTaken, Stopped
from buffer.redis_store import lua_scripts
from buffer.redis_store.connection import Outage, Patience, connect, insist
from buffer.redis_store.keys import Keys

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
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


class LeasedConnection:
    """A connection to Redis that holds the run's lease from `acquire` until `close`. Calls are repeated for
    `patience_s` seconds while Redis does not answer; once `stop` is set, for a few seconds."""

    def __init__(
        self, url: str, keys: Keys, patience_s: float, stop: threading.Event | None
    ) -> None:
        self.keys = keys
        self.redis = connect(url)
        self.info: list[Any] = []
        """Fields and values of the run's hash, as published"""
        self._url, self._patience_s, self._stop = url, patience_s, stop
        self._outage = Outage()
        self._owner: Owner | None = None
        self._token = ""
        self._taken: RunTaken | None = None
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._acquire = self.redis.register_script(lua_scripts.ACQUIRE)
        self._scripts = {
            name: self.redis.register_script(lua_scripts.GUARD + getattr(lua_scripts, name))
            for name in (
                "ADMIT", "ANEW", "CREATE_GROUPS", "FORGET", "PUBLISH", "QUARANTINE", "READMIT", "REMOVE",
                "RENEW_LEASE", "TRIM",
            )
        }  # fmt: skip

    def acquire(self, owner: Owner, stop: threading.Event | None) -> None:
        """Waits for the end of the lease of a learner that is gone. Raises RunTaken if another learner is at
        work, and Stopped if `stop` is set meanwhile."""
        args = [owner.run_id, owner.place, msgspec.json.encode(owner), round(LEASE_S * 1000)]
        keys = [self.keys.owner, self.keys.info]
        first = self.call(lambda: self._acquire(keys, args))
        answer: Any = first
        while answer[0] == b"0":
            if answer[1:] != first[1:]:  # pyright: ignore
                raise _taken(self.keys.run, answer[1], "choose another name, or stop that learner")
            if answer is first:
                logger.info("run %s: waits for the end of another learner's lease", self.keys.run)
            if (stop or self._closing).wait(0.2):
                raise Stopped("while another learner's lease went on")
            answer = self.call(lambda: self._acquire(keys, args))
        self._token, self._owner = answer[0], owner
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
        return bool(self._guarded("RENEW_LEASE", keys, [*args, *self.info]))

    def change(self, script: str, keys: list[str], args: list[Any], *, disk: bool = True) -> Any:
        """Runs a script that changes the run. Raises RunTaken if another learner has acquired the run. Without
        `disk` it is not repeated while Redis cannot write its append-only file."""
        return self.call(lambda: self._guarded(script, keys, args), disk=disk)

    def _guarded(self, name: str, keys: list[str], args: list[Any]) -> Any:
        try:
            mine = (self._owner.run_id, self._owner.place) if self._owner else ("", "")
            return self._scripts[name]([self.keys.owner, *keys], [self._token, *mine, *args])
        except redis.ResponseError as error:
            code, _, record = str(error).partition(" ")
            if code != "FENCED":
                raise
            advice = "this one has changed nothing since then"
            raise _taken(self.keys.run, record.encode(), advice) from error

    def call(self, call: Callable[[], _T], *, disk: bool = True) -> _T:
        if self._taken:
            raise self._taken
        patience = Patience(self._url, self._patience_s, self._outage, self._stop)
        try:
            return insist(patience, call, disk=disk)
        except BufferGone:
            self._patience_s = 0.0
            raise

    def close(self) -> None:
        """Gives up the lease, so that the next learner need not wait for its end."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
            with suppress(redis.RedisError, RunTaken):
                self._renew(0.0)
        self.redis.close()


def _taken(run: str, record: bytes, advice: str) -> RunTaken:
    who = f", {msgspec.json.decode(record, type=Owner)}" if record else ""
    return RunTaken(f"run {run} has another learner{who}: {advice}")
