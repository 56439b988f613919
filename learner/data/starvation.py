"""Messages that say, with numbers, what a learner waits for when it has waited long for groups."""

import time
from collections.abc import Sequence

from areal_q.messages import WorkerStatus
from buffer.interface import Claims

SAY_AFTER_S = 20.0
"""Seconds of waiting after which a message is due."""
SAY_AGAIN_S = 60.0
"""Seconds from one message to the next."""
ASK_EVERY_S = 5.0
"""Seconds of waiting from one question to the workers whether they wait for room to the next. It is above two
heartbeats and a worker's pause between two attempts, so that no answer is older than the room last made."""


class Starvation:
    """Times the messages about a wait: the first after SAY_AFTER_S seconds, then one every SAY_AGAIN_S.
    One that is not given, since workers draw, is due again ASK_EVERY_S later. Also times the questions to the
    workers, one every ASK_EVERY_S."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._said = False
        self._next_s = 0.0
        self._ask_s = 0.0

    def over(self) -> bool:
        """Ends the wait, as groups came in. Returns True if there was a message about it."""
        announced, self._said, self.since_s = self._said, False, None
        return announced

    def due(self) -> float | None:
        """Returns the seconds waited if a message is due now, else None. Call it while no groups come in."""
        now_s = time.monotonic()
        if self.since_s is None:
            self.since_s, self._next_s = now_s, now_s + SAY_AFTER_S
            self._ask_s = now_s + ASK_EVERY_S
        if now_s < self._next_s:
            return None
        self._next_s = now_s + ASK_EVERY_S
        return now_s - self.since_s

    def said(self) -> None:
        """Notes that the message was given."""
        self._said, self._next_s = True, time.monotonic() + SAY_AGAIN_S

    def asks(self) -> bool:
        """Returns True if the workers are to be asked now. Call it while no groups come in."""
        now_s = time.monotonic()
        if self.since_s is None or now_s < self._ask_s:
            return False
        self._ask_s = now_s + ASK_EVERY_S
        return True


def sentence(
    seconds: float,
    ready: int,
    needed: int,
    claims: Claims,
    workers: Sequence[WorkerStatus],
    met: bool,
) -> str:
    """Returns the message about a wait of `seconds` for which `ready` of the `needed` groups are there. `met`
    is True if this learner has ever heard of a worker: one that starts is silent until its engine is loaded.

    Example: no step for 20 s: 3 of 8 groups are ready; 16 tickets are open, 4 of them claimed (w0: 4);
    w0 waits for version 9, with version 4; workers draw 0 tokens/s
    """
    held = ", ".join(f"{name}: {count}" for name, count in sorted(claims.by_worker.items()))
    claimed = sum(claims.by_worker.values())
    parts = [
        f"no step for {seconds:.0f} s: {ready} of {needed} groups are ready",
        f"{claims.open} tickets are open, {claimed} of them claimed"
        + (f" ({held})" if held else ""),
        *(f"{w.worker} waits for {w.waits_for}" for w in workers if w.waits_for),
        *(f"{w.worker} failed last by {w.failure}" for w in workers if w.failure),
    ]
    if workers:
        parts.append("workers draw 0 tokens/s")
    elif claimed:
        parts.append("no heartbeat comes from those that claimed them")
    else:
        parts.append(
            "no worker is alive" if met else "no worker has reported yet: is one starting?"
        )
    return "; ".join(parts)
