"""Hands the latest value from a thread to an event loop."""

import asyncio
import threading
from contextlib import suppress
from typing import Generic, TypeVar

from areal_q.errors import WeightVersionError

T = TypeVar("T")


class LatestValue(Generic[T]):
    """Holds at most one value: a newer one replaces it (latest wins), and `take` empties it. Thread-safe.

    A value that was replaced before it was taken is gone
    (test_versions_published_faster_than_taken_are_skipped). Closing wakes everybody who waits, with an error
    (test_wait_raises_when_the_subscriber_is_closed).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._content: T | None = None
        self._closed = False
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def put(self, content: T) -> None:
        """Replaces the value and wakes everybody who waits for one."""
        with self._lock:
            self._content = content
            self._wake()

    def take(self) -> T | None:
        """Returns the value and empties the holder; None where it is empty."""
        with self._lock:
            content, self._content = self._content, None
            return content

    async def wait(self) -> T:
        """Returns the value as soon as there is one, and empties the holder.

        Raises WeightVersionError when the holder is closed and empty.
        """
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiters.add(waiter)
        try:
            while (content := self.take()) is None:
                if self._closed:
                    raise WeightVersionError("the subscriber of weights stopped")
                await waiter[1].wait()
                waiter[1].clear()
            return content
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def close(self) -> None:
        """Lets everybody who waits end; a value that is still there can be taken."""
        with self._lock:
            self._closed = True
            self._wake()

    def _wake(self) -> None:
        for loop, event in self._waiters:
            with suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)
