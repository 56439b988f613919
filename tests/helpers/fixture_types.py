"""Types of the fixtures in tests/conftest.py that make something, and the buffer that they make."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import redis

from areal_q.config import Run
from areal_q.messages import Group
from areal_q.weights.version import WeightVersion
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import Keys
from learner.data.packing import Sample

MakeRun = Callable[..., Run]
MakeSamples = Callable[..., list[Sample]]
MakeGroup = Callable[..., Group]
MakeVersion = Callable[..., WeightVersion]
MakeBuffers = Callable[[], "Buffers"]


class Buffers:
    """Makes either side of the buffer of run "run" in the real Redis at `url`, which it empties."""

    def __init__(self, url: str) -> None:
        self._url, self._learners = url, list[LearnerBuffer]()
        with redis.Redis.from_url(url) as client:
            client.flushall()

    def learner(self) -> LearnerBuffer:
        self._learners.append(LearnerBuffer(self._url, "run"))
        return self._learners[-1]

    @asynccontextmanager
    async def worker(
        self, name: str = "w", claim_timeout_s: float = 30.0
    ) -> AsyncIterator[WorkerBuffer]:
        side = WorkerBuffer(self._url, "run", name, claim_timeout_s)
        try:
            yield side
        finally:
            await side.close()

    def poison(self, stream: str, count: int = 1) -> None:
        """Puts what can be decoded as nothing into one of the streams that Keys names."""
        with redis.Redis.from_url(self._url) as client:
            for _ in range(count):
                client.xadd(getattr(Keys("run"), stream), {"record": b"\xc1"})

    def empty(self, stream: str) -> None:
        """Removes the entries of a stream."""
        with redis.Redis.from_url(self._url) as client:
            client.xtrim(getattr(Keys("run"), stream), maxlen=0, approximate=False)

    def close(self) -> None:
        for learner in self._learners:
            learner.close()
