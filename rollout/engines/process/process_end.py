"""Waits for the end of processes that are not children of this one, such as the workers of a child."""

import asyncio
import os
from collections.abc import Iterable


async def first_end(pids: Iterable[int]) -> None:
    """Returns as soon as one of the processes `pids` has ended. It never returns if `pids` is empty, or if the
    system has no file descriptors for processes (Linux has them)."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    opened: list[int] = []
    try:
        for pid in pids:
            try:
                opened.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            except (AttributeError, OSError):
                continue
            loop.add_reader(opened[-1], end.set)
        await end.wait()
    finally:
        for descriptor in opened:
            loop.remove_reader(descriptor)
            os.close(descriptor)
