"""How late a loop is, measured beside something that holds it for a time that the test sets."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollout.loop_lag import EVERY_S, WINDOW_S, LoopLag


@asynccontextmanager
async def watching() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    task = asyncio.ensure_future(lag.watch())
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_loop_that_is_held_is_as_late_as_it_was_held():
    async with watching() as lag:
        assert lag.p99_s == lag.max_s == 0.0
        await asyncio.sleep(2 * EVERY_S)
        held_s = 0.4
        time.sleep(held_s)
        await asyncio.sleep(0.01)
        assert held_s - EVERY_S <= lag.max_s
        assert lag.p99_s == lag.max_s  # one of a few is more than a hundredth


def test_one_measurement_in_a_hundred_may_be_late():
    lag = LoopLag()
    count = round(WINDOW_S / EVERY_S)
    for hundredths, p99_s in ((1, 0.01), (2, 3.0)):
        late = hundredths * count // 100
        lag._late_s.extend([0.01] * (count - late) + [3.0] * late)
        assert (lag.p99_s, lag.max_s) == (p99_s, 3.0)
    lag._late_s.extend([0.02] * count)  # what is older than the window is forgotten
    assert (lag.p99_s, lag.max_s) == (0.02, 0.02)
