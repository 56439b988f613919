"""What a run asks of Redis, the learner and the network, by arithmetic, and how many runs that makes."""

import itertools
from dataclasses import dataclass, replace

from bench.common import number, table
from bench.scale.redis_costs import GROUP_SIZE, RedisCosts, group_bytes

LIMITS = {"Redis's core": 0.7, "learner's reading": 0.2}
"""Shares above which one run is too few: groups then wait long for Redis, or workers for the learner"""


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


def shares(load: Load, costs: RedisCosts) -> dict[str, float]:
    """Returns by arithmetic how much of each part `load` takes, 1 being all of it."""
    nbytes, card = group_bytes(load.response_tokens), load.network_bytes_per_s
    group_s = costs.of_group(nbytes)
    delta = load.delta_bytes / card / load.step_s
    reading_s = (group_s / 2 + costs.read_byte_s * nbytes) * load.batch
    return {
        "Redis's core": load.groups_per_s * group_s + load.workers * costs.beat_s / load.beat_s,
        "Redis's card": load.groups_per_s * nbytes / card,
        "learner's card": delta
        * (-(-load.workers // load.fan_out) if load.fan_out else load.workers),
        "learner's reading": reading_s / (reading_s + load.step_s),
        "a relay's card": delta * load.fan_out,
    }


def remedies(load: Load, costs: RedisCosts, fan_out: int) -> list[tuple[int, Load]]:
    """Returns (number of runs, load of each): one as it is, one with relays, and as many as keep the limits."""
    found = [(1, load)]
    if load.workers > fan_out:
        found.append((1, replace(load, fan_out=fan_out)))
    for runs in itertools.count(1):
        each = replace(load, workers=-(-load.workers // runs), fan_out=fan_out)
        taken = shares(each, costs)
        if all(taken[part] <= limit for part, limit in LIMITS.items()):
            return [*found, (runs, each)] if runs > 1 else found
    raise AssertionError


def arithmetic(costs: RedisCosts, load: Load) -> str:
    """What one of each carries by itself."""
    nbytes = group_bytes(load.response_tokens)
    per_worker = load.groups_per_s * costs.of_group(nbytes) + costs.beat_s / load.beat_s
    card = load.network_bytes_per_s
    rows = [
        ["Redis: a group of no size", f"{costs.group_s * 1e6:.0f} µs"],
        ["Redis: a megabyte of groups, in and out", f"{costs.byte_s * 1e12:.0f} µs"],
        ["Redis: a heartbeat and a renewal", f"{costs.beat_s * 1e6:.0f} µs"],
        ["learner: a megabyte of groups, read and checked", f"{costs.read_byte_s * 1e12:.0f} µs"],
        [f"a group, {GROUP_SIZE} × {load.response_tokens:,} tokens", f"{nbytes / 1e3:,.0f} kB"],
        ["workers at which one Redis is full", f"{1 / per_worker:,.0f}"],
        ["a version's delta", f"{load.delta_bytes / 1e6:.1f} MB"],
        ["direct subscribers that the card serves in a second", number(card / load.delta_bytes)],
        ["the same with INT8 snapshots in place of deltas", number(card / 7e9)],
    ]
    return table(["one of each", "measured, or by arithmetic"], rows)
