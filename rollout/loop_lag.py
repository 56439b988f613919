"""Measures how late an event loop is: what shares it with a long computation times out."""

import asyncio
import math
import time
from collections import deque

EVERY_S = 0.05
"""Seconds between two measurements"""
WINDOW_S = 30.0
"""Seconds that the figures are about"""


class LoopLag:
    """Keeps by how many seconds the running loop's timers were late in the last WINDOW_S."""

    def __init__(self) -> None:
        self._late_s: deque[float] = deque([0.0], maxlen=round(WINDOW_S / EVERY_S))

    async def watch(self) -> None:
        """Measures until cancelled."""
        while True:
            due_s = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._late_s.append(time.monotonic() - due_s)

    @property
    def p99_s(self) -> float:
        """The smallest lag in seconds that 99 of 100 measurements do not exceed."""
        late_s = sorted(self._late_s)
        return late_s[math.ceil(0.99 * len(late_s)) - 1]

    @property
    def max_s(self) -> float:
        return max(self._late_s)
