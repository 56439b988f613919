"""How far one Redis, one learner's network card and relays carry: `python -m bench.scale.simulation`.

A discrete-event simulation of a run, from ten workers to ten thousand, with Redis's costs measured in the same
run (bench/scale/redis_costs.py) or, by `--costs`, before. What is simulated is what the code does:

    learner: admit (v + η + 1)·B tickets ─▶ Redis ─▶ worker: generate ─▶ Redis ─▶ learner: B groups, a step
    worker:  starts a ticket once it has weights as new as the ticket; M groups at a time; a heartbeat a second
    weights: a delta leaves the learner's card once for every subscriber: each worker, or each relay

The learner is as large as it must be: B groups are what the workers generate in one step's time.
It reads between two steps, a page of groups at once, so its waiting share is what reading takes. So what is
found is what the plumbing costs: workers that wait for tickets or weights, and a Redis that is full.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy
import typer

from bench.common import commit, device, number, publish, say, table
from bench.scale.redis_costs import GROUP_SIZE, RedisCosts, group_bytes, measure
from buffer.redis_store.streams import READ_PAGE

WORKERS = (10, 100, 1_000, 3_000, 10_000)
Process = Generator[Any, Any, None]


@dataclass(frozen=True)
class Load:
    """A 7B model on one GPU a worker, INT8 weights; 16 responses of 2,000 tokens to a prompt."""

    workers: int
    tokens_per_s: float = 5_000.0
    """Of one worker"""
    response_tokens: int = 2_000
    spread: float = 0.5
    """Standard deviation of the logarithm of a group's duration"""
    in_flight: int = 8
    """Groups that a worker generates at once"""
    step_s: float = 60.0
    """Of the learner"""
    max_lag: int = 2
    delta_bytes: float = 7e9 / 400
    """A version's delta: 7e9 codes of one byte, of which 1/400 is sent (bench/README.md)"""
    network_bytes_per_s: float = 100e9 / 8 * 0.7
    """100 Gb/s, of which ZeroMQ moves 70 %"""
    fan_out: int = 0
    """Subscribers of a relay; 0: every worker is the learner's own"""
    beat_s: float = 1.0

    @property
    def groups_per_s(self) -> float:
        """What the workers generate when nothing holds them up."""
        return self.workers * self.tokens_per_s / (GROUP_SIZE * self.response_tokens)

    @property
    def batch(self) -> int:
        return max(1, round(self.groups_per_s * self.step_s))

    @property
    def group_s(self) -> float:
        """Mean time to generate a group beside `in_flight` - 1 others."""
        return self.in_flight * GROUP_SIZE * self.response_tokens / self.tokens_per_s

    def arrival_s(self, worker: int) -> float:
        """Returns the time from the end of a step until `worker` has the new weights."""
        one = self.delta_bytes / self.network_bytes_per_s
        if not self.fan_out:
            return one * (worker + 1)
        return one * (worker // self.fan_out + 1) + one * (worker % self.fan_out + 1)


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
    """One run of `load`; `redis_speed` scales the measured costs, for a faster or slower core."""

    def __init__(self, load: Load, costs: RedisCosts, nbytes: int, seed: int = 0) -> None:
        self.load, self.seed = load, seed
        self.env = simpy.Environment()
        self.redis = simpy.Resource(self.env)
        self.tickets = simpy.Store(self.env)
        self.committed = simpy.Store(self.env)
        self.published_s = [0.0]
        """When each version left the learner"""
        self._rng = np.random.default_rng(seed)
        self._costs = costs
        # A group is admitted and claimed as one small request, then committed, then read.
        self._request_s = costs.group_s / 3
        self._payload_s = costs.byte_s * nbytes / 2
        self.busy_s = self.busy_places_s = self.waited_s = 0.0
        self._active, self._changed_s = 0, 0.0
        self.commits: list[float] = []
        self.lag_max = self.dropped = 0
        self.since_s = math.inf

    def run(self, steps: int) -> Result:
        """Simulates `steps` learner steps' time; measures the second half."""
        load = self.load
        whole_s = steps * load.step_s
        self.since_s = whole_s / 2
        self.env.process(self.learner())
        for worker in range(load.workers):
            self.env.process(self.beats(worker))
            for _ in range(load.in_flight):
                self.env.process(self.place(worker))
        self.env.run(whole_s)
        self._generating(0)
        span_s = whole_s - self.since_s
        places = load.workers * load.in_flight
        return Result(
            groups_per_s=len(self.commits) / span_s,
            redis_busy=self.busy_s / span_s,
            commit_p99_s=float(np.quantile(self.commits, 0.99)) if self.commits else math.nan,
            idle=1 - self.busy_places_s / (places * span_s),
            learner_wait=self.waited_s / span_s,
            weights_s=max(load.arrival_s(w) for w in (0, load.workers - 1)),
            lag_max=self.lag_max,
            dropped=self.dropped,
        )

    def serve(self, seconds: float) -> Process:
        """A request of so much processor time, in turn."""
        with self.redis.request() as turn:
            yield turn
            began = self.env.now
            yield self.env.timeout(seconds)
            self.busy_s += self._counted(began)

    def beats(self, worker: int) -> Process:
        yield self.env.timeout(self._rng.random() * self.load.beat_s)
        while True:
            yield from self.serve(self._costs.beat_s)
            yield self.env.timeout(self.load.beat_s)

    def place(self, worker: int) -> Process:
        """One of the groups that a worker generates at once."""
        load = self.load
        # exp of a normal of this mean has mean 1.
        mean, sigma = -(load.spread**2) / 2, load.spread
        while True:
            ticket = yield self.tickets.get()
            yield from self.serve(self._request_s)
            ready_s = self.published_s[ticket] + load.arrival_s(worker) * (ticket > 0)
            if ready_s > self.env.now:
                yield self.env.timeout(ready_s - self.env.now)
            self._generating(+1)
            yield self.env.timeout(load.group_s * math.exp(self._rng.normal(mean, sigma)))
            self._generating(-1)
            ended = self.env.now
            yield from self.serve(self._request_s + self._payload_s)
            if self.env.now > self.since_s:
                self.commits.append(self.env.now - ended)
            self.committed.put(ticket)

    def learner(self) -> Process:
        load, admitted, version = self.load, 0, 0
        while True:
            bound = (version + load.max_lag + 1) * load.batch + self.dropped
            for _ in range(bound - admitted):
                self.tickets.put(version)
            admitted = bound
            began, taken = self.env.now, 0
            while taken < load.batch:
                ages = yield from self.read(min(READ_PAGE, load.batch - taken), version)
                self.lag_max = max([self.lag_max, *(age for age in ages if age <= load.max_lag)])
                late = sum(age > load.max_lag for age in ages)
                for _ in range(late):
                    self.tickets.put(version)
                self.dropped += late
                admitted += late
                taken += len(ages) - late
            self.waited_s += self._counted(began)
            yield self.env.timeout(load.step_s)
            version += 1
            self.published_s.append(self.env.now)

    def read(self, count: int, version: int) -> Generator[Any, Any, list[int]]:
        """Up to `count` groups in one request, as soon as there is one; their ages in versions."""
        tickets = [(yield self.committed.get())]
        while len(tickets) < count and self.committed.items:
            tickets.append((yield self.committed.get()))
        yield from self.serve(len(tickets) * (self._request_s + self._payload_s))
        return [version - ticket for ticket in tickets]

    def _generating(self, change: int) -> None:
        """`change` more places generate from now on."""
        self.busy_places_s += self._active * self._counted(self._changed_s)
        self._active += change
        self._changed_s = self.env.now

    def _counted(self, began: float) -> float:
        """Seconds since `began` that lie in the measured half."""
        return max(0.0, self.env.now - max(began, self.since_s))


def simulate(load: Load, costs: RedisCosts, steps: int = 6) -> Result:
    return Simulation(load, costs, group_bytes(load.response_tokens)).run(steps)


def main(
    fan_out: int = typer.Option(64, help="subscribers of a relay"),
    largest: int = typer.Option(WORKERS[-1], help="workers at most"),
    known: str = typer.Option(
        "", "--costs", help="measured before: µs a group, ns a byte, µs a beat"
    ),
) -> None:
    """Prints what is measured of Redis, what follows by arithmetic, and what the simulation finds."""
    if known:
        group_us, byte_ns, beat_us = map(float, known.split(","))
        costs = RedisCosts(1e-6 * group_us, 1e-9 * byte_ns, 1e-6 * beat_us)
    else:
        say("measuring Redis")
        costs = measure()
    rows, values = [], []
    for workers in (n for n in WORKERS if n <= largest):
        for load in (Load(workers), Load(workers, fan_out=fan_out)):
            say(f"{workers} workers, {'relays' if load.fan_out else 'no relays'}")
            found = simulate(load, costs)
            values.append({"workers": workers, "fan_out": load.fan_out} | vars(found))
            rows.append(
                [
                    f"{workers:,}",
                    f"{-(-workers // load.fan_out):,}" if load.fan_out else "–",
                    number(load.groups_per_s),
                    number(found.groups_per_s),
                    f"{found.redis_busy:.0%}",
                    f"{found.commit_p99_s * 1e3:,.1f} ms",
                    f"{found.weights_s:.2f} s",
                    f"{found.idle:.1%}",
                    f"{found.learner_wait:.1%}",
                ]
            )
    header = ["workers", "relays", "groups/s wanted", "groups/s", "Redis busy", "commit p99"]
    text = [
        f"{device()}, commit {commit()}; Redis measured, the rest simulated",
        arithmetic(costs, Load(1)),
        table([*header, "weights everywhere", "workers idle", "learner reads"], rows),
    ]
    publish("scale_sim", "\n\n".join(text), {"costs": vars(costs), "results": values})


def arithmetic(costs: RedisCosts, load: Load) -> str:
    """What one of each carries by itself."""
    nbytes = group_bytes(load.response_tokens)
    per_worker = load.groups_per_s * costs.of_group(nbytes) + costs.beat_s / load.beat_s
    card = load.network_bytes_per_s
    rows = [
        ["Redis: a group of no size", f"{costs.group_s * 1e6:.0f} µs"],
        ["Redis: a megabyte of groups, in and out", f"{costs.byte_s * 1e12:.0f} µs"],
        ["Redis: a heartbeat and a renewal", f"{costs.beat_s * 1e6:.0f} µs"],
        [f"a group, {GROUP_SIZE} × {load.response_tokens:,} tokens", f"{nbytes / 1e3:,.0f} kB"],
        ["workers at which one Redis is full", f"{1 / per_worker:,.0f}"],
        ["a version's delta", f"{load.delta_bytes / 1e6:.1f} MB"],
        ["direct subscribers that the card serves in a second", number(card / load.delta_bytes)],
        ["the same with INT8 snapshots in place of deltas", number(card / 7e9)],
    ]
    return table(["one of each", "measured, or by arithmetic"], rows)


if __name__ == "__main__":
    typer.run(main)
