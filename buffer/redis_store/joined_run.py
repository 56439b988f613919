"""The run that a worker joined: what its learner published, and whether it still is that run."""

import asyncio
import functools
import logging
import time
from typing import Any

import msgspec

from areal_q.errors import RunChanged, RunFinished
from areal_q.messages import Ticket
from areal_q.system.credentials import shown
from buffer.interface import RunInfo
from buffer.redis_store.consumer import TicketConsumer

logger = logging.getLogger(__name__)


class JoinedRun:
    def __init__(self, consumer: TicketConsumer) -> None:
        """Begins without a run; `join` names one."""
        self._consumer, self._name = consumer, consumer.keys.run
        self._joined: RunInfo | None = None

    async def info(self) -> RunInfo:
        """Returns what the learner published, and waits until it has."""
        waits = False
        while (info := await self._info()) is None:
            if not waits:
                where = shown(self._consumer.url)
                logger.info("waiting for a learner of run %s at %s", self._name, where)
            waits = True
            await asyncio.sleep(0.1)
        return info

    async def unfinished(self, patience_s: float) -> RunInfo:
        """Returns what the learner published. If the run is finished, waits `patience_s` for a learner that
        resumes it, which may start after its workers, and then raises RunFinished."""
        deadline, waits = time.monotonic() + patience_s, False
        while (info := await self.info()).finished:
            if time.monotonic() >= deadline:
                raise self._finished()
            if not waits:
                logger.info(
                    "run %s is finished: waits %g s for a learner that goes on",
                    self._name,
                    patience_s,
                )
            waits = True
            await asyncio.sleep(0.2)
        return info

    def join(self, info: RunInfo) -> None:
        """Joins the run that `info` describes. Another run of the same name raises RunChanged from now on."""
        self._joined = info

    @property
    def id(self) -> str:
        """Id of the run that was joined; "" if it has none, or none was joined"""
        return self._joined.run_id if self._joined else ""

    async def check(self) -> None:
        """Raises RunChanged if the run is not the one that was joined or has other settings, and RunFinished if
        it is finished. If Redis has lost the run's description, nothing is raised."""
        joined, found = self._joined, await self._info()
        if joined is None or found is None:
            return
        if found.run_id != joined.run_id:
            raise self.changed(found.run_id)
        if found.settings != joined.settings:
            raise RunChanged(f"run {self._name} goes on with other settings")
        if found.finished:
            raise self._finished()

    def is_foreign(self, ticket: Ticket) -> bool:
        return bool(self._joined and ticket.run_id and ticket.run_id != self._joined.run_id)

    async def _info(self) -> RunInfo | None:
        names = ["config", "endpoints", "run_id", "settings", "finished"]
        hmget: Any = functools.partial(self._consumer.redis.hmget, self._consumer.keys.info, names)
        config, endpoints, run_id, settings, finished = await self._consumer.call(hmget)
        if config is None or endpoints is None:
            return None
        ends = msgspec.json.decode(endpoints, type=dict[str, str])
        run_id, settings = ((part or b"").decode() for part in (run_id, settings))
        return RunInfo(config.decode(), ends, run_id, settings, bool(finished))

    def _finished(self) -> RunFinished:
        return RunFinished(f"run {self._name} is finished")

    def changed(self, found: str) -> RunChanged:
        """Returns the error that says that the run of that name has the id `found` now."""
        return RunChanged(
            f"run {self._name} is another one now: its id is {found or 'unknown'}, "
            f"this worker was set up for {self.id or 'one without an id'}"
        )
