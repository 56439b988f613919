"""Runs what a test awaits."""

import asyncio
from collections.abc import Coroutine
from typing import Any

HANG_S = 200.0


def run_async(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end. Raises TimeoutError for one that hangs."""
    asyncio.run(asyncio.wait_for(work, HANG_S))
