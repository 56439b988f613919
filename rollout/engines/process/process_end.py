"""Waits for the end of processes that are not this one's children, such as a child's own workers."""

import asyncio
import os
from collections.abc import Iterable


async def first_end(pids: Iterable[int]) -> None:
    """Returns once one of `pids` has ended, at once where one has ended already. It never returns where there
    are none, or where the system has no file descriptors of processes (Linux has)."""
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
