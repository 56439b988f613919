"""Weights from learner to worker: full snapshots beside bare pyzmq and a disk, fan-out, deltas.

    python -m bench.weights.broadcast

Measured between two processes over ipc and tcp on this machine. Bare pyzmq is a PUSH socket that sends the
same payload in chunks of 4 MiB, uncopied, to a PULL socket that drops them: no request, no buffer, no hash.
Both take turns in one run; medians of REPEATS count, also of the ratio within a turn, whose halves meet much
the same load, and the CPU time of both processes beside them.
bench/weights/deltas.py has the bytes of deltas, bench/weights/swap.py what a version costs learner and engine.
Prints a table, and writes it to runs/bench/broadcast.{md,json}.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
import zmq
from safetensors.torch import load_file, save_file

from areal_q.config import BroadcastConfig
from areal_q.weights import version as weights
from areal_q.weights.version import PayloadPool, WeightVersion
from bench.common import commit, device, number, publish, table, versions
from buffer.weight_sync import WeightServer, WeightSubscriber
from buffer.weight_sync.curve import ClientKeys, client_keys, make_keys

SNAPSHOT_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
REPEATS = 15
CONFIG = BroadcastConfig()
FAN_OUT = (1, 4, 16)
FAN_OUT_BYTES = 32 << 20
FAN_OUT_TURNS = 15
FOLLOWED_BYTES = (1 << 20, 64 << 20)
FOLLOWED = 50
CHANGED = 1e-3
"""Share of the codes that changes between two versions that are followed"""


def make(number: int, payload: torch.Tensor, pool: PayloadPool | None = None) -> WeightVersion:
    return weights.pack_version(
        {"t": payload},
        run="bench",
        epoch="a",
        version=number,
        format="int8",
        uaq_scale=1.0,
        model={},
        published_s=0.0,
        pool=pool,
    )


def serve(
    transport: str, directory: str, nbytes: int, deltas: bool, shared: bool, keys: str
) -> None:
    """The learner's process. Obeys one line at a time, `publish N`, `push` or `cpu`; answers each with one
    line. The worker can read the payload in place if `shared`."""
    ends = [f"ipc://{directory}/{n}" if transport == "ipc" else "tcp://127.0.0.1:0" for n in "afp"]
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, nbytes, np.uint8)
    pool = PayloadPool(shared=shared)
    config = BroadcastConfig(max_delta_bytes=nbytes if deltas else 0, keys=keys or None)
    weight_server = WeightServer(ends[0], ends[1], config)
    with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
        pusher.bind(ends[2])
        answer(*weight_server.endpoints, pusher.getsockopt_string(zmq.LAST_ENDPOINT))
        for line in sys.stdin:
            if line.startswith("cpu"):
                answer(time.process_time())
                continue
            if line.startswith("push"):
                answer(time.time())
                for at in range(0, nbytes, CHUNK_BYTES):
                    pusher.send(noise.data[at : at + CHUNK_BYTES], copy=False)
                continue
            if deltas:
                noise[rng.integers(0, nbytes, int(CHANGED * nbytes))] += 1
            else:
                noise += 1
            version = make(int(line.split()[1]), torch.from_numpy(noise), pool)
            manifest = msgspec.structs.replace(version.manifest, published_s=time.time())
            began = time.perf_counter()
            weight_server.publish(WeightVersion(manifest, version.payload, version.tensors))
            answer(time.perf_counter() - began)
    weight_server.close()


def answer(*values: object) -> None:
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


class Learner:
    """`serve` in a process of its own."""

    def __init__(
        self,
        transport: str,
        directory: str,
        nbytes: int,
        deltas: bool,
        shared: bool = True,
        keys: str = "",
    ) -> None:
        choices = [str(int(deltas)), str(int(shared)), keys]
        arguments = ["serve", transport, directory, str(nbytes), *choices]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.weights.broadcast", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.announce, self.fetch, self.push = self._answer()

    def ask(self, line: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(self._answer()[0])

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def close(self) -> None:
        self._process.communicate()


async def received(subscriber: WeightSubscriber, number: int) -> float:
    """Seconds from publish to the event loop of the worker."""
    while True:
        manifest = (await subscriber.wait()).manifest
        if manifest.version == number:
            return time.time() - manifest.published_s


def worker_keys(keys: str) -> ClientKeys | None:
    return client_keys(keys) if keys else None


def snapshot(transport: str, shared: bool, curve: bool = False) -> dict[str, float]:
    """MB/s of a snapshot that is fetched and verified, and of bare pyzmq, by turns; CPU milliseconds of both
    processes for each."""
    ours, bare, cpu_ms = [], [], []
    with tempfile.TemporaryDirectory() as directory, zmq.Context() as context:
        keys = directory if curve else ""
        if curve:
            make_keys(Path(directory))
        learner = Learner(transport, directory, SNAPSHOT_BYTES, False, shared, keys)
        subscriber = WeightSubscriber(
            learner.announce, learner.fetch, run="bench", config=CONFIG, keys=worker_keys(keys)
        )
        cpu_s = lambda: time.process_time() + learner.ask("cpu")  # noqa: E731
        with context.socket(zmq.PULL) as pull:
            pull.connect(learner.push)
            for turn in range(REPEATS + 4):
                learner.ask(f"publish {turn}")
                before = [cpu_s()]
                ours.append(SNAPSHOT_BYTES / asyncio.run(received(subscriber, turn)) / 1e6)
                before.append(cpu_s())
                began = learner.ask("push")
                for _ in range(0, SNAPSHOT_BYTES, CHUNK_BYTES):
                    pull.recv(copy=False)
                bare.append(SNAPSHOT_BYTES / (time.time() - began) / 1e6)
                before.append(cpu_s())
                cpu_ms.append([1e3 * (b - a) for a, b in pairwise(before)])
        subscriber.close()
        learner.close()
    # The first ones touch fresh memory.
    ours, bare, cpu_ms = ours[4:], bare[4:], cpu_ms[4:]
    return {
        "ours": median(ours),
        "bare": median(bare),
        "ratio": median(own / other for own, other in zip(ours, bare, strict=True)),
        "best_ours": max(ours),
        "best_bare": max(bare),
        "cpu_ours_ms": min(turn[0] for turn in cpu_ms),
        "cpu_bare_ms": min(turn[1] for turn in cpu_ms),
    }


def latency(nbytes: int) -> dict[str, float]:
    """Milliseconds from publish to the worker's event loop by delta, and of the call of `publish`."""
    with tempfile.TemporaryDirectory() as directory:
        learner = Learner("ipc", directory, nbytes, deltas=True)
        subscriber = WeightSubscriber(learner.announce, learner.fetch, run="bench")
        took, calls = [], []
        for turn in range(FOLLOWED + 2):
            calls.append(1e3 * learner.ask(f"publish {turn}"))
            took.append(1e3 * asyncio.run(received(subscriber, turn)))
        deltas = subscriber.stats.deltas
        subscriber.close()
        learner.close()
    assert deltas == FOLLOWED + 1
    percent = lambda values, q: float(np.percentile(values[2:], q))  # noqa: E731
    return {
        "bytes": nbytes,
        "received_p50_ms": percent(took, 50),
        "received_p99_ms": percent(took, 99),
        "publish_p50_ms": percent(calls, 50),
        "publish_p99_ms": percent(calls, 99),
    }


def fan_out(workers: int) -> dict[str, float]:
    """`workers` subscribers in this process: a snapshot to all, then deltas, and what they cost the learner."""
    with tempfile.TemporaryDirectory() as directory:
        learner = Learner("ipc", directory, FAN_OUT_BYTES, deltas=True)
        subscribers = [
            WeightSubscriber(learner.announce, learner.fetch, run="bench", config=CONFIG)
            for _ in range(workers)
        ]

        async def all_received(turn: int) -> float:
            return max(await asyncio.gather(*(received(r, turn) for r in subscribers)))

        learner.ask("publish 0")
        whole_s = asyncio.run(all_received(0))
        took, before = [], learner.ask("cpu")
        for turn in range(1, FAN_OUT_TURNS + 1):
            learner.ask(f"publish {turn}")
            took.append(1e3 * asyncio.run(all_received(turn)))
        cpu_ms = 1e3 * (learner.ask("cpu") - before) / FAN_OUT_TURNS
        for subscriber in subscribers:
            subscriber.close()
        learner.close()
    return {
        "workers": workers,
        "snapshot_s": whole_s,
        "snapshot_mb_s": workers * FAN_OUT_BYTES / whole_s / 1e6,
        "delta_last_p50_ms": median(took),
        "learner_cpu_ms": cpu_ms,
    }


def on_disk() -> dict[str, float]:
    """Seconds to write and to load the same bytes as safetensors in a directory that workers would share."""
    wrote, read = [], []
    tensors = {"t": torch.randint(-128, 128, (SNAPSHOT_BYTES,), dtype=torch.int8)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        path = Path(directory) / "weights.safetensors"
        for _ in range(3):
            began = time.perf_counter()
            save_file(tensors, path)
            os.sync()
            wrote.append(time.perf_counter() - began)
            began = time.perf_counter()
            load_file(path)["t"].clone()
            read.append(time.perf_counter() - began)
    return {"write_s": median(wrote), "load_s": median(read)}


def main() -> None:
    torch.set_num_threads(1)
    snapshots = {t: snapshot(t, shared=True) for t in ("ipc", "tcp")}
    snapshots |= {f"{t}, by socket": snapshot(t, shared=False) for t in ("ipc", "tcp")}
    snapshots["tcp, by socket, CURVE"] = snapshot("tcp", shared=False, curve=True)
    disk = on_disk()
    fans = [fan_out(workers) for workers in FAN_OUT]
    latencies = [latency(nbytes) for nbytes in FOLLOWED_BYTES]
    sections = [
        f"Broadcast · {device()} · commit {commit()} · {versions('pyzmq', 'zstandard', 'torch')}",
        f"Full snapshot of {SNAPSHOT_BYTES >> 20} MiB, verified, beside bare pyzmq:",
        table(
            [
                *(
                    "transport",
                    "ours MB/s",
                    "bare MB/s",
                    "ratio of a turn",
                    "best of each",
                    "ratio",
                ),
                *("CPU ms, best", "ratio"),
            ],
            [
                [
                    t,
                    number(v["ours"]),
                    number(v["bare"]),
                    f"{v['ratio']:.2f}",
                    f"{number(v['best_ours'])} of {number(v['best_bare'])}",
                    f"{v['best_ours'] / v['best_bare']:.2f}",
                    f"{number(v['cpu_ours_ms'])} beside {number(v['cpu_bare_ms'])}",
                    f"{v['cpu_bare_ms'] / v['cpu_ours_ms']:.2f}",
                ]
                for t, v in snapshots.items()
            ],
        ),
        f"The same bytes as safetensors on disk: written in {disk['write_s']:.2f} s "
        f"({SNAPSHOT_BYTES / disk['write_s'] / 1e6:,.0f} MB/s), "
        f"loaded in {disk['load_s']:.2f} s ({SNAPSHOT_BYTES / disk['load_s'] / 1e6:,.0f} MB/s).",
        f"{FAN_OUT_BYTES >> 20} MiB to several workers in one process (ipc), then deltas of "
        f"{CHANGED:.1%}:",
        table(
            [
                "workers",
                "snapshot to all, s",
                "MB/s in all",
                "delta, last worker p50 ms",
                "learner CPU ms",
            ],
            [[number(v) for v in fan.values()] for fan in fans],
        ),
        f"A delta of {CHANGED:.1%} changed codes, from publish to the worker's event loop (ipc):",
        table(
            ["payload MiB", "received p50 ms", "p99", "publish() p50 ms", "p99"],
            [
                [number(v["bytes"] / 2**20), *(number(x) for k, x in v.items() if k != "bytes")]
                for v in latencies
            ],
        ),
    ]
    values: dict[str, Any] = {"snapshots": snapshots, "latencies": latencies}
    values |= {"disk": disk, "fan_out": fans}
    publish("broadcast", "\n\n".join(sections), values)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        nbytes, deltas, shared = map(int, sys.argv[4:7])
        serve(sys.argv[2], sys.argv[3], nbytes, bool(deltas), bool(shared), sys.argv[7])
    else:
        main()
