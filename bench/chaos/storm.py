"""Real processes under random faults, and then: were the promises kept? `make chaos`.

    python -m bench.chaos --faults 200                 the scripted engine: docs/survival.md
    python -m bench.chaos --engine torch --steps 120   the reward, beside an undisturbed run's
    python -m bench.chaos --soak-min 30                no fault that ends a process: does any of them grow?
    python -m bench.chaos --ranks 2                    a learner of several processes, any of them killed

| promise                                                  | how it is checked (bench/chaos/promises.py)   |
|----------------------------------------------------------|-----------------------------------------------|
| no committed group lost, none counted twice              | a witness of the stream against the logs      |
| a run learns from its own groups alone                   | ids in the log; what is spoilt is set aside   |
| one learner leads a run                                  | a second is started, and must be refused      |
| no token older than the bound                            | spans and digests of the log, counted again   |
| workers run exactly what was published                   | digests in groups against the learner's log   |
| training goes on after every fault, to the same reward   | a step after the last; two runs               |
| memory and open files stay flat                          | of the longest-lived process of each service  |

Exit code 1 where one was broken. Needs nothing but Linux; root adds namespaces and disks that fill, and
libfaketime (--faketime or LIBFAKETIME: its path) adds clocks that jump.
"""

import argparse
import heapq
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from areal_q.observability.metrics_log import read_metrics
from bench.chaos.cluster import Cluster, cluster
from bench.chaos.faults import Fault, faults, mild, schedule, usage
from bench.chaos.promises import Growth, Left, Seen, Witness, broken, growth

MAX_LAG = 2
SETTLE_STEPS = 3
"""Steps after the last fault by which a run has shown that it goes on"""
SETTLE_S = 240.0
SAMPLE_S = 5.0
COMMON = """
[learner]
max_lag = 2
groups = {groups}
group_size = {group_size}
entropy_coef = {entropy_coef}
[buffer]
claim_timeout_s = 4.0
max_deliveries = 1000
[broadcast]
timeout_s = 2.0
[checkpoint]
every = 20
"""
SCRIPTED = """
steps = 1000000
[model]
layers = 1
width = 32
heads = 2
kv_heads = 1
mlp = 48
max_positions = 32
[task]
type = "arithmetic"
digits = 1
heldout = 4
[rollout.engine]
type = "scripted"
tokens_per_s = 300
[rollout.sampling]
max_tokens = 4
[learner.optimizer]
type = "adamw"
lr = 1e-2
[eval]
every = 1000
problems = 4
""" + COMMON.format(groups=8, group_size=2, entropy_coef=0.1)
TORCH = """
steps = 1000000
[model]
layers = 2
width = 64
mlp = 128
[task]
type = "arithmetic"
digits = 1
heldout = 20
[warmstart]
steps = 30
until_accuracy = 0.3
[rollout.engine]
type = "torch"
[rollout.sampling]
max_tokens = 4
[learner.optimizer]
type = "adamw"
lr = 1e-3
[eval]
every = 1000
problems = 20
""" + COMMON.format(groups=32, group_size=8, entropy_coef=0.0)


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a run."""

    seed: int
    minutes: float = 0.0
    faults: dict[str, int] = {}
    steps: int = 0
    groups: int = 0
    forks: int = 0
    runs: int = 0
    """Runs of the one name, one after the other"""
    differing: int = 0
    """Resumed learners whose replayed steps gave other bits than before"""
    starts: dict[str, int] = {}
    deaths: list[str] = []
    """Processes that ended though no fault had ended them, with their last words"""
    breaches: list[str] = []
    growth: list[Growth] = []
    missing: list[str] = []
    """Faults that this machine does not allow"""
    rewards: list[float] = []
    """Mean reward of each step of the last run's surviving history"""

    def judge(self, made: Cluster, seen: Seen) -> None:
        """Adds what is left of the present run, whose learner has stopped."""
        with made.client() as client:
            left = Left.of(made.run_dir, client, made.services["learner"].log, MAX_LAG)
        self.breaches += broken(left, seen, made.notes)
        self.runs += 1
        self.steps += left.state.step
        self.groups += len(seen.committed)
        self.forks += len({record.fork for record in left.steps})
        records = read_metrics(made.run_dir / "metrics.jsonl")
        self.rewards = [r["reward/mean"] for r in records if r["kind"] == "step"]


class Storm:
    """Faults at random intervals, each undone when its time has come."""

    def __init__(
        self,
        found: list[Fault],
        made: Cluster,
        seed: int,
        gap_s: float,
        at_work: Callable[[], None],
    ) -> None:
        self._cluster, self._rng, self._gap_s = made, random.Random(seed), gap_s
        self._at_work = at_work
        """Returns once the run has made a step"""
        self._schedule = schedule(found, self._rng)
        self._next_s = time.monotonic()
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self.count: Counter[str] = Counter()
        self.history: list[str] = []

    def blow(self, another: bool) -> None:
        """Undoes what is due; begins one more fault where its time has come and there is to be `another`."""
        now = time.monotonic()
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        if another and now >= self._next_s:
            fault = next(self._schedule)
            if fault.alone:
                self.undo_all()
                self._at_work()
            undo = fault.begin(self._cluster, self._rng)
            if fault.alone:
                self._at_work()
            if undo and fault.alone:
                undo()
            elif undo:
                end = now + self._rng.uniform(*fault.seconds)
                heapq.heappush(self._undo, (end, self.count.total(), undo))
            self.count[fault.name] += 1
            self.history.append(f"{time.strftime('%H:%M:%S')} {fault.name}")
            self._next_s = time.monotonic() + self._rng.uniform(0.2, 1.8) * self._gap_s

    def undo_all(self) -> None:
        while self._undo:
            heapq.heappop(self._undo)[2]()

    def calm(self) -> None:
        self.undo_all()
        for path in self._cluster.clocks.values():
            path.write_text("+0")


def survive(
    config: str,
    seed: int,
    count: int,
    gap_s: float,
    until_step: int = 0,
    soak_min: float = 0.0,
    **options,
) -> Outcome:
    """Runs `config` under `count` faults, `gap_s` apart on average, and on to step `until_step`; or, to
    soak, for so many minutes under faults that end no process, after which none may have grown."""
    began = time.monotonic()
    outcome = Outcome(seed=seed)
    samples: dict[str, list[tuple[float, int, int, int]]] = {}
    with cluster(f"seed = {seed}\n{config}", **options) as made:
        outcome.missing = [
            name
            for name, there in (
                ("network cut", made.network),
                ("full disk", made.disks),
                ("clock jump", made.clocks),
            )
            if not there
        ]
        witness = Witness(made)
        made.judge = lambda: outcome.judge(made, witness.next_run())

        def steps(more: int, least: int = 0) -> None:
            goal = max(least, witness.version + more)
            reached = partial(_reached, witness, goal)
            until(made, samples, witness, reached, outcome, f"step {goal}")

        try:
            steps(2)
            found = mild(made) if soak_min else faults(made)
            storm = Storm(found, made, seed, gap_s, at_work=partial(steps, 2))
            end = time.monotonic() + 60 * soak_min
            while storm.count.total() < count or time.monotonic() < end:
                storm.blow(another=True)
                tend(made, samples)
            storm.calm()
            steps(SETTLE_STEPS, until_step)
            made.stop("rollout-1", "rollout-2", "rollout-0", "relay", "learner")
            witness.stop()
            outcome.judge(made, witness.seen)
        finally:
            witness.stop()
            keep_logs(made)
        outcome.faults = dict(sorted(storm.count.items()))
        outcome.differing = made.services["learner"].log.read_text().count("replay differs at")
        outcome.starts = {name: s.starts for name, s in made.services.items()}
        outcome.deaths = [death for s in made.services.values() for death in s.deaths]
        outcome.growth = [g for name, s in samples.items() if (g := growth(name, s))]
        if soak_min:
            outcome.breaches += [f"{g.service} grew" for g in outcome.growth if not g.flat]
    outcome.minutes = (time.monotonic() - began) / 60
    return outcome


def _reached(witness: Witness, goal: int) -> bool:
    return witness.version >= goal


def tend(made: Cluster, samples: dict[str, list[tuple[float, int, int, int]]]) -> None:
    """One turn of the supervisor."""
    made.tend()
    now = time.monotonic()
    for name, service in made.services.items():
        mine = samples.setdefault(name, [])
        due = not mine or now - mine[-1][0] >= SAMPLE_S
        if due and service.pid and (used := usage(service.pid)):
            mine.append((now, service.pid, *used))
    time.sleep(0.1)


def until(
    made: Cluster,
    samples: dict[str, list[tuple[float, int, int, int]]],
    witness: Witness,
    reached: Callable[[], bool],
    outcome: Outcome,
    what: str,
) -> None:
    """Tends the cluster until `reached`; that it takes longer than SETTLE_S without a step is a breach."""
    step, since = witness.version, time.monotonic()
    while not reached():
        tend(made, samples)
        now = witness.version
        if now != step:
            step, since = now, time.monotonic()
        if time.monotonic() - since > SETTLE_S:
            outcome.breaches.append(f"{what}: no step for {SETTLE_S:.0f} s, at step {step}")
            return


def keep_logs(made: Cluster) -> None:
    """Keeps what each process said, where CHAOS_LOGS names a directory."""
    if place := os.environ.get("CHAOS_LOGS"):
        Path(place).mkdir(parents=True, exist_ok=True)
        for service in made.services.values():
            (Path(place) / service.log.name).write_bytes(service.log.read_bytes())


def find_faketime() -> str | None:
    """Path of libfaketime: LIBFAKETIME, or where Debian puts it."""
    places = [
        os.environ.get("LIBFAKETIME", ""),
        *map(str, Path("/usr/lib").glob("*/faketime/*.so.1")),
    ]
    return next((place for place in places if place and Path(place).is_file()), None)


def lines_of(outcome: Outcome) -> Iterator[str]:
    count = sum(outcome.faults.values())
    yield f"seed {outcome.seed}: {count} faults in {outcome.minutes:.1f} min"
    yield (
        f"{outcome.steps} steps, {outcome.groups} groups, {outcome.forks} histories of {outcome.runs} runs, "
        f"{outcome.differing} of which began with other bits"
    )
    yield "faults: " + ", ".join(f"{n}× {name}" for name, n in outcome.faults.items())
    yield "starts: " + ", ".join(f"{name} {n}" for name, n in outcome.starts.items())
    if outcome.missing:
        yield "not possible here: " + ", ".join(outcome.missing)
    for g in outcome.growth:
        yield (
            f"{g.service}: {g.minutes:.1f} min, {g.resident_mb[0]:.0f} → {g.resident_mb[1]:.0f} MB, "
            f"{g.files[0]:.0f} → {g.files[1]:.0f} files"
        )
    for death, n in Counter(outcome.deaths).most_common():
        yield f"ended by itself, {n}×: {death}"
    for breach in outcome.breaches[:50]:
        yield f"BROKEN: {breach}"
    yield f"{len(outcome.breaches)} promises broken"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--gap-s", type=float, default=5.0, help="between two faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("scripted", "torch"), default="scripted")
    parser.add_argument("--steps", type=int, default=0, help="at least so many")
    parser.add_argument("--soak-min", type=float, default=0.0, help="minutes without a kill")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the learner")
    parser.add_argument("--faketime", default=find_faketime(), help="path of libfaketime")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unmounts, and removes the namespace
    config = SCRIPTED if args.engine == "scripted" else TORCH
    count = 0 if args.soak_min else args.faults
    options = {"faketime": args.faketime, "ranks": args.ranks}
    storm = survive(config, args.seed, count, args.gap_s, args.steps, args.soak_min, **options)
    print("\n".join(lines_of(storm)))
    if args.engine == "torch":
        calm = survive(config, args.seed, 0, 1.0, args.steps, faketime=None)
        for name, found in (("faults", storm), ("none", calm)):
            last = found.rewards[: args.steps][-10:]
            print(
                f"{name}: mean reward of the last 10 of {args.steps} steps {sum(last) / len(last):.3f}"
            )
    sys.exit(bool(storm.breaches))
