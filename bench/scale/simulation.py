"""How far one Redis, one learner's network card and relays carry: `python -m bench.scale.simulation`.

A discrete-event simulation of a run, from ten workers to ten thousand, with Redis's costs measured in the same
run (bench/scale/redis_costs.py) or, by `--costs`, before. What is simulated is what the code does:

    learner: admit (v + η + 1)·B tickets ─▶ Redis ─▶ worker: generate ─▶ Redis ─▶ learner: B groups, a step
    worker:  starts a ticket once it has weights as new as the ticket; M groups at a time; a heartbeat a second
    weights: a delta leaves the learner's card once for every subscriber: each worker, or each relay

The learner is as large as it must be: B groups are what the workers generate in one step's time.
It reads between two steps, a page of groups at once, so its waiting share is what reading takes. So what is
found is what the plumbing costs: workers that wait for tickets or weights, and a Redis that is full. There the
same workers are simulated again as several runs, each on a server of its own in a Redis Cluster.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import typer

from bench.common import commit, device, number, publish, say, table
from bench.scale.load import Load, arithmetic, remedies, shares
from bench.scale.redis_costs import RedisCosts, group_bytes, measure
from buffer.redis_store.streams import groups_of_a_page

WORKERS = (10, 100, 1_000, 10_000)


@dataclass
class Result:
    groups_per_s: float
    """Committed; of the second half of the simulated time, like all below"""
    redis_busy: float
    """Share of the time in which Redis's thread works"""
    commit_p99_s: float
    idle: float
    """Share of the workers' places without a group to generate"""
    learner_wait: float
    weights_s: float
    """Until the last worker has a new version"""
    lag_max: int
    """Of the groups that were used, in versions"""
    dropped: int
    """Groups too old to be used, from the start on; each was refilled"""


class Simulation:
    """One run of `load`, with an event for the end of each group and one for the answer to its commit.

    Heartbeats, many and small, are a steady load: a worker's next one is due `beat_s` after the answer to its
    last.
    """

    def __init__(self, load: Load, costs: RedisCosts, nbytes: int, seed: int = 0) -> None:
        self.load, self.now = load, 0.0
        self._rng = np.random.default_rng(seed)
        self._costs, self._page = costs, groups_of_a_page(nbytes)
        # A group is admitted and claimed as one small request, then committed, then read.
        self._request_s = costs.group_s / 3
        self._payload_s = costs.byte_s * nbytes / 2
        self._read_s = costs.read_byte_s * nbytes
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._backlog_s = self._asked_s = 0.0
        self._tickets: deque[int] = deque()
        self._committed: deque[int] = deque()
        self._idle = deque(range(load.workers * load.in_flight))
        """Places that wait for a ticket; a worker has one for each group that it generates at once"""
        self._published_s: list[float] = []
        """When each version left the learner"""
        self._admitted = self._taken = 0
        self._began_s, self._takes, self._reads = 0.0, False, False
        self.busy_s = self.busy_places_s = self.waited_s = 0.0
        self.commits: list[float] = []
        self.lag_max = self.dropped = 0
        self.since_s = self.until_s = math.inf

    def run(self, steps: int) -> Result:
        """Simulates `steps` learner steps' time; measures the second half."""
        load = self.load
        self.until_s = steps * load.step_s
        self.since_s = self.until_s / 2
        self._publish()
        while self._events and self._events[0][0] < self.until_s:
            self.now, _, event, args = heapq.heappop(self._events)
            event(*args)
        self.now = self.until_s
        self.serve(0.0)
        if self._takes:
            self.waited_s += self._counted(self._began_s, self.now)
        places, span_s = load.workers * load.in_flight, self.until_s - self.since_s
        return Result(
            groups_per_s=len(self.commits) / span_s,
            redis_busy=min(1.0, self.busy_s / span_s),
            commit_p99_s=float(np.quantile(self.commits, 0.99)) if self.commits else math.nan,
            idle=1 - self.busy_places_s / (places * span_s),
            learner_wait=self.waited_s / span_s,
            weights_s=max(load.arrival_s(w) for w in (0, load.workers - 1)),
            lag_max=self.lag_max,
            dropped=self.dropped,
        )

    def serve(self, seconds: float) -> float:
        """Asks Redis for so much processor time, in turn; returns when the answer comes."""
        elapsed_s = self.now - self._asked_s
        beats = self.load.workers * self._costs.beat_s / (self.load.beat_s + self._backlog_s)
        self.busy_s += seconds * (self.now >= self.since_s)
        self.busy_s += beats * self._counted(self._asked_s, self.now)
        self._backlog_s = max(0.0, self._backlog_s - elapsed_s * (1 - beats)) + seconds
        self._asked_s = self.now
        return self.now + self._backlog_s

    def _at(self, time_s: float, event: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event, args))

    def _start(self) -> None:
        """Gives the open tickets to the places that wait for one."""
        load = self.load
        while self._idle and self._tickets:
            place, ticket = self._idle.popleft(), self._tickets.popleft()
            answered_s = self.serve(self._request_s)
            weights_s = self._published_s[ticket] + load.arrival_s(place // load.in_flight) * (
                ticket > 0
            )
            began_s = max(answered_s, weights_s)
            # exp of a normal of this mean has mean 1.
            ended_s = began_s + load.group_s * math.exp(
                load.spread * self._rng.standard_normal() - load.spread**2 / 2
            )
            self.busy_places_s += self._counted(began_s, min(ended_s, self.until_s))
            self._at(ended_s, self._commit, place, ticket)

    def _commit(self, place: int, ticket: int) -> None:
        answered_s = self.serve(self._request_s + self._payload_s)
        if self.since_s < answered_s < self.until_s:
            self.commits.append(answered_s - self.now)
        self._at(answered_s, self._is_committed, place, ticket)

    def _is_committed(self, place: int, ticket: int) -> None:
        self._committed.append(ticket)
        self._idle.append(place)
        self._start()
        self._read()

    def _publish(self) -> None:
        """Begins the step of the next version: admits tickets and takes groups."""
        self._published_s.append(self.now)
        version = len(self._published_s) - 1
        bound = (version + self.load.max_lag + 1) * self.load.batch + self.dropped
        self._tickets.extend([version] * (bound - self._admitted))
        self._admitted, self._taken = bound, 0
        self._began_s, self._takes = self.now, True
        self._start()
        self._read()

    def _read(self) -> None:
        """Reads a page of groups in one request, if there are any and the learner takes them now."""
        count = min(self._page, self.load.batch - self._taken, len(self._committed))
        if count and self._takes and not self._reads:
            self._reads = True
            answered_s = self.serve(count * (self._request_s + self._payload_s))
            self._at(answered_s + count * self._read_s, self._use, count)

    def _use(self, count: int) -> None:
        """Takes `count` groups for the step, which begins when they are enough; replaces those too old."""
        self._reads = False
        version = len(self._published_s) - 1
        ages = [version - self._committed.popleft() for _ in range(count)]
        fresh = [age for age in ages if age <= self.load.max_lag]
        self.lag_max = max([self.lag_max, *fresh])
        self.dropped += count - len(fresh)
        self._admitted += count - len(fresh)
        self._tickets.extend([version] * (count - len(fresh)))
        self._taken += len(fresh)
        self._takes = self._taken < self.load.batch
        self._read()
        if not self._takes:
            self.waited_s += self._counted(self._began_s, self.now)
            self._at(self.now + self.load.step_s, self._publish)
        self._start()

    def _counted(self, began_s: float, ended_s: float) -> float:
        """Returns the seconds from `began_s` to `ended_s` that lie in the measured half."""
        return max(0.0, ended_s - max(began_s, self.since_s))


def simulate(load: Load, costs: RedisCosts, steps: int = 10) -> Result:
    return Simulation(load, costs, group_bytes(load.response_tokens)).run(steps)


def main(
    fan_out: int = typer.Option(64, help="subscribers of a relay"),
    known: str = typer.Option(
        "", "--costs", help="measured before: µs a group, ns a byte, µs a beat, ns a byte read"
    ),
) -> None:
    """Prints what is measured of Redis, what follows by arithmetic, and what the simulation finds."""
    if known:
        group_us, byte_ns, beat_us, read_ns = map(float, known.split(","))
        costs = RedisCosts(1e-6 * group_us, 1e-9 * byte_ns, 1e-6 * beat_us, 1e-9 * read_ns)
    else:
        say("measuring Redis")
        costs = measure()
    rows, values = [], []
    for workers in WORKERS:
        for runs, load in remedies(Load(workers), costs, fan_out):
            say(f"{runs} × {load.workers} workers, relays of {load.fan_out}")
            found, taken = simulate(load, costs), shares(load, costs)
            values.append({"workers": workers, "runs": runs} | vars(load) | vars(found) | taken)
            rows.append(row_of(runs, load, found, taken))
    header = ["workers", "relays", "groups/s wanted", "groups/s", "Redis busy", "commit p99"]
    header += ["weights everywhere", "workers idle", "learner waits", "fullest parts"]
    text = [
        f"{device()}, commit {commit()}; Redis measured, the rest simulated",
        arithmetic(costs, Load(1)),
        table(header, rows),
    ]
    publish("scale_sim", "\n\n".join(text), {"costs": vars(costs), "results": values})


def row_of(runs: int, load: Load, found: Result, taken: dict[str, float]) -> list[str]:
    """Returns a row of the table; of several runs groups/s are those of all."""
    fullest = sorted(taken.items(), key=lambda item: -item[1])[:2]
    return [
        f"{runs} runs of {load.workers:,}" if runs > 1 else f"{load.workers:,}",
        f"{-(-load.workers // load.fan_out):,}" if load.fan_out else "–",
        number(runs * load.groups_per_s),
        number(runs * found.groups_per_s),
        f"{found.redis_busy:.1%}",
        f"{found.commit_p99_s * 1e3:,.1f} ms",
        f"{found.weights_s:.2f} s",
        f"{found.idle:.1%}",
        f"{found.learner_wait:.1%}",
        ", ".join(f"{part} {share:.1%}" for part, share in fullest),
    ]


if __name__ == "__main__":
    typer.run(main)
