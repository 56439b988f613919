"""The buffer beside bare redis-py, dm-reverb, TransferQueue and torchrl, and the log beside plain pyarrow.

    make bench-buffer          or: python -m bench.buffer [--reverb-python …] [--peers-python …]

Each system gets the same groups of 8 responses, one producer and one consumer, one call after the other; ours
and bare Redis also from 64 workers of one process at once. The systems take turns, and the best of the rounds
counts. CPU time is that of the client and of Redis together: on a busy machine it says more than the clock.
"Durable" is the time until kill -9 of everything loses nothing of it: ours and bare Redis write an append-only
file with every commit (fsync every second, or with `always` before the answer), the others save everything at
the end.
"""

import argparse
import asyncio
import gc
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import chain, starmap
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow.parquet as pq
import redis
import redis.asyncio
import uvloop

from areal_q.messages import Array, Group, Ticket, VersionSpan, encode
from bench.common import ROOT, commit, device, number, peer_env, publish, say, table, versions
from bench.peers.buffer_rows import make_group as arrays_of
from bench.peers.buffer_rows import nbytes_of, summary
from bench.records import make_group, make_ticket, make_trajectory
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.logs.trajectory_schema import TRAJECTORY_SCHEMA, groups_to_table
from buffer.redis_store import Claim, LearnerBuffer, WorkerBuffer
from buffer.redis_store.local_server import RedisServer

RESPONSES = 8
SIZES = {1024: 256, 16384: 64, 32768: 64}
"""Groups for each length of a response"""
PEERS = {"dm-reverb": "reverb", "TransferQueue": "transferqueue", "torchrl": "torchrl"}
WORKERS = 64
"""Workers that commit at once, where there is more than one"""
MANY, MANY_BARE = f"ours, {WORKERS} workers", f"bare Redis, {WORKERS} connections"
Result = dict[str, float]
T = TypeVar("T")


def ticket_of(number: int) -> Ticket:
    return make_ticket(number, run="bench", prompt="p", answer="a", group_size=RESPONSES)


def group_of(ticket: Ticket, tokens: int) -> Group:
    arrays = arrays_of(ticket.number, tokens, RESPONSES)
    spans = [VersionSpan(0, tokens, "d")]
    trajectories = [
        make_trajectory(
            i,
            arrays["response_ids"][i],
            arrays["behavior_logprobs"][i],
            loss_mask=Array.of(arrays["loss_mask"][i]),
            spans=spans,
        )
        for i in range(RESPONSES)
    ]
    return make_group(ticket, trajectories=trajectories)


def ours(tokens: int, count: int, fsync: str, workers: int = 1) -> Result:
    """WorkerBuffer.commit, then LearnerBuffer.read: validated, encoded, decoded and validated again.

    With several `workers` each has connections of its own, and all commit at once.
    """
    with _server(fsync) as server, redis.Redis.from_url(server.url) as client:
        learner = LearnerBuffer(server.url, "bench")
        learner.publish_run("", {})
        learner.admit([ticket_of(n) for n in range(count)], count)
        groups = [group_of(ticket_of(n), tokens) for n in range(count)]

        async def connect() -> list[tuple[WorkerBuffer, list[Claim]]]:
            made = [WorkerBuffer(server.url, "bench", f"w{n}") for n in range(workers)]
            return [(worker, await worker.claim(count // workers, 0.0)) for worker in made]

        async def commit_all(worker: WorkerBuffer, claims: list[Claim]) -> list[float]:
            times = []
            for claim in claims:
                began = time.perf_counter()
                assert await worker.commit(claim, groups[claim.ticket.number])
                times.append(time.perf_counter() - began)
            await worker.close()
            return times

        async def produce(connected: list[tuple[WorkerBuffer, list[Claim]]]) -> list[float]:
            return list(chain(*await asyncio.gather(*starmap(commit_all, connected))))

        found = _measured(client, connect, produce, lambda: learner.read(count, 0.0))
        learner.close()
    return found


def bare(tokens: int, count: int, fsync: str, workers: int = 1) -> Result:
    """redis-py's XADD and XREAD of the same bytes, made before and never looked at."""
    records = [encode(group_of(ticket_of(n), tokens)) for n in range(count)]
    with _server(fsync) as server, redis.Redis.from_url(server.url) as client:

        async def connect() -> list[redis.asyncio.Redis]:
            made = [redis.asyncio.Redis.from_url(server.url) for _ in range(workers)]
            for connection in made:
                await connection.ping()
            return made

        async def add_all(connection: redis.asyncio.Redis, mine: list[bytes]) -> list[float]:
            times = []
            for record in mine:
                began = time.perf_counter()
                await connection.xadd("groups", {b"record": record})
                times.append(time.perf_counter() - began)
            await connection.aclose()
            return times

        async def produce(made: list[redis.asyncio.Redis]) -> list[float]:
            shares = [add_all(made[n], records[n::workers]) for n in range(workers)]
            return list(chain(*await asyncio.gather(*shares)))

        def consume() -> None:
            last: Any = b"0-0"
            for _ in range(0, count, 64):
                reply: Any = client.xread({"groups": last}, count=64)
                last = reply[0][1][-1][0]

        return _measured(client, connect, produce, consume)


def peer(name: str, python: Path, tokens: int, count: int) -> Result:
    """One of bench/peers/buffer_*.py in its own environment."""
    script = ROOT / "bench" / "peers" / f"buffer_{PEERS[name]}.py"
    with tempfile.TemporaryDirectory(prefix="aq-bench-") as directory:
        command = [str(python), str(script), *map(str, (tokens, RESPONSES, count, directory))]
        done = subprocess.run(command, env=peer_env(1), capture_output=True, text=True, timeout=300)
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not told:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return msgspec.json.decode(told[0].removeprefix("RESULT "), type=Result)


def log_results(tokens: int, count: int) -> Result:
    """Seconds of wall time to write and read `count` groups, a step each of 8: ours and plain pyarrow's."""
    groups = [group_of(ticket_of(n), tokens) for n in range(count)]
    steps = [groups[i : i + 8] for i in range(0, count, 8)]
    tables = [groups_to_table(step, step, batch) for step, batch in enumerate(steps)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def write() -> None:
            log = TrajectoryLog(directory / "log")
            for step, batch in enumerate(steps):
                log.append(step, step, batch)
            log.close()

        def plain() -> None:
            with pq.ParquetWriter(
                directory / "plain", TRAJECTORY_SCHEMA, compression="zstd"
            ) as writer:
                for rows in tables:
                    writer.write_table(rows)

        return {
            "write": _elapsed(write),
            "plain_write": _elapsed(plain),
            "read": _elapsed(lambda: list(iter_log(directory / "log"))),
            "plain_read": _elapsed(lambda: pq.read_table(directory / "plain")),
        }


@contextmanager
def _server(fsync: str) -> Iterator[RedisServer]:
    """Runs a Redis of its own whose files go when it stops."""
    with (
        tempfile.TemporaryDirectory(prefix="aq-") as root,
        RedisServer.start(Path(root, "redis"), Path(root, "s"), appendfsync=fsync) as server,
    ):
        yield server


def _elapsed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _measured(
    client: redis.Redis,
    connect: Callable[[], Coroutine[Any, Any, T]],
    produce: Callable[[T], Coroutine[Any, Any, list[float]]],
    consume: Callable[[], Any],
) -> Result:
    """Seconds of clock and CPU of `produce`, on the event loop that workers have, and of `consume`."""

    def cpu() -> float:
        info: Any = client.info("cpu")
        return time.process_time() + info["used_cpu_sys"] + info["used_cpu_user"]

    memory: Any = client.info("memory")
    cpu_s: list[float] = []
    clock_s: list[float] = []

    async def run() -> list[float]:
        connected = await connect()
        gc.collect()  # so that no collection of what the bench left behind falls into what is measured
        cpu_s.append(cpu())
        clock_s.append(time.perf_counter())
        times = await produce(connected)
        clock_s.append(time.perf_counter())
        return times

    times = uvloop.run(run())
    cpu_s.append(cpu())
    gc.collect()
    after: Any = client.info("memory")
    cpu_s.append(cpu())
    out_s = _elapsed(consume)
    cpu_s.append(cpu())
    _, p99_s = summary(times)
    return {
        "in_s": clock_s[1] - clock_s[0],
        "p99_s": p99_s,
        "out_s": out_s,
        "persist_s": 0.0,
        "grown": float(after["used_memory"] - memory["used_memory"]),
        "cpu_in_s": cpu_s[1] - cpu_s[0],
        "cpu_out_s": cpu_s[3] - cpu_s[2],
    }


def best(results: list[Result]) -> Result:
    """The smallest of each figure over the rounds."""
    return {key: min(r[key] for r in results) for key in results[0]}


def measure(pythons: dict[str, Path], rounds: int) -> dict[int, dict[str, Result]]:
    """{tokens: {system: result}}; the systems take turns."""
    systems: dict[str, Callable[[int, int], Result]] = {
        "ours": lambda t, n: ours(t, n, "everysec"),
        "bare Redis": lambda t, n: bare(t, n, "everysec"),
        "ours, fsync always": lambda t, n: ours(t, n, "always"),
        "bare Redis, fsync always": lambda t, n: bare(t, n, "always"),
    }
    systems[MANY] = lambda t, n: ours(t, n, "everysec", WORKERS)
    systems[MANY_BARE] = lambda t, n: bare(t, n, "everysec", WORKERS)
    for name in PEERS:
        if pythons[name].exists():
            systems[name] = lambda t, n, name=name: peer(name, pythons[name], t, n)
        else:
            say(f"{name} is left out: no {pythons[name]}; `make` can make it")
    found: dict[int, dict[str, list[Result]]] = {}
    for tokens, count in SIZES.items():
        for turn in range(rounds):
            for name, system in systems.items():
                say(f"{tokens} tokens, round {turn + 1}: {name}")
                found.setdefault(tokens, {}).setdefault(name, []).append(system(tokens, count))
    return {t: {name: best(r) for name, r in by.items()} for t, by in found.items()}


def rows_of(tokens: int, results: dict[str, Result]) -> list[list[str]]:
    count = SIZES[tokens]
    payload = nbytes_of(arrays_of(0, tokens, RESPONSES))
    rows = []
    for name, r in results.items():
        durable_s = r["in_s"] + r["persist_s"]
        overhead = (r["grown"] - count * payload) / (count * RESPONSES)
        figures = [
            count / r["in_s"],
            count * payload / r["in_s"] / 1e6,
            count / durable_s,
            count / r["out_s"],
            count * payload / r["out_s"] / 1e6,
            r["p99_s"] * 1e3,
        ]
        rows.append([name, *map(number, figures), f"{overhead:,.0f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reverb-python", type=Path, default=ROOT / ".venv-reverb/bin/python")
    parser.add_argument("--peers-python", type=Path, default=ROOT / ".venv-buffer-peers/bin/python")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    peers_python: Path = args.peers_python
    pythons = dict.fromkeys(PEERS, peers_python) | {"dm-reverb": args.reverb_python}
    results = measure(pythons, args.rounds)
    logs = {t: best([log_results(t, n) for _ in range(args.rounds)]) for t, n in SIZES.items()}
    about = versions("redis", "msgspec", "pyarrow")
    lines = [f"{device()}, commit {commit()}, {', '.join(f'{k} {v}' for k, v in about.items())}"]
    header = ["system", "groups/s in", "MB/s in", "groups/s in, durable", "groups/s out"]
    header += ["MB/s out", "p99 commit, ms", "bytes over the payload, a response"]
    for tokens, by_system in results.items():
        lines += ["", f"8 responses of {tokens:,} tokens a group", ""]
        lines.append(table(header, rows_of(tokens, by_system)))
        for own, plain in (("ours", "bare Redis"), (MANY, MANY_BARE)):
            mine, theirs = by_system[own], by_system[plain]
            keys = ("in_s", "out_s", "cpu_in_s", "cpu_out_s")
            shares = [f"{theirs[key] / mine[key]:.2f}" for key in keys]
            lines.append(
                f"\n{own} of {plain}, in and out: by the clock {shares[0]} and {shares[1]}, by CPU"
            )
            lines[-1] += f" time {shares[2]} and {shares[3]}"
    lines += ["", "The log: ours as a share of plain pyarrow's speed", ""]
    shares = [
        [f"{t:,}", number(r["plain_write"] / r["write"]), number(r["plain_read"] / r["read"])]
        for t, r in logs.items()
    ]
    lines.append(table(["tokens", "writing", "reading"], shares))
    values = {"results": {str(t): r for t, r in results.items()}, "log": logs}
    publish("buffer", "\n".join(lines), {"device": device(), "commit": commit(), **values})


if __name__ == "__main__":
    main()
