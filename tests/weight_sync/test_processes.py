"""Processes that are killed, stopped and started again, and memory over a thousand versions."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers.weight_sync import await_version, collect, follow

from areal_q.config import BroadcastConfig
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer

Make = Callable[..., WeightVersion]

WORKER = """
import asyncio, sys
from areal_q.config import BroadcastConfig
from buffer.weight_sync import WeightSubscriber

async def main():
    config = BroadcastConfig(chunk_bytes=int(sys.argv[3]), timeout_s=0.5)
    subscriber = WeightSubscriber(sys.argv[1], sys.argv[2], run="run", config=config)
    print("ready", flush=True)
    while True:
        print((await subscriber.wait()).manifest.version, flush=True)

asyncio.run(main())
"""

BUSY_WORKER = """
import sys, threading, time
from areal_q.config import BroadcastConfig
from buffer.weight_sync import WeightSubscriber

def busy_at_first(version, _):
    number = version.manifest.version
    print(number, flush=True)
    if number == 0:
        time.sleep(4.0)

config = BroadcastConfig(timeout_s=0.5)
subscriber = WeightSubscriber(sys.argv[1], sys.argv[2], run="run", config=config, on_version=busy_at_first)
print("ready", flush=True)
threading.Event().wait()
"""

LEARNER = """
import sys, time, torch
from areal_q.weights import version as weights
from areal_q.config import BroadcastConfig
from buffer.weight_sync import WeightServer

weight_server = WeightServer(sys.argv[1], sys.argv[2], BroadcastConfig(heartbeat_s=0.05))
number = 0
while True:
    tensors = {"t": torch.full((1 << 20,), number % 100, dtype=torch.int8)}
    weight_server.publish(weights.pack(tensors, run="run", epoch=sys.argv[3], version=number, format="int8",
                                     uaq_scale=1.0, model={}, published_s=0.0))
    number += 1
    time.sleep(0.002)
"""


@pytest.fixture
def weight_server(endpoints: tuple[str, str], stack: ExitStack) -> WeightServer:
    made = WeightServer(*endpoints, BroadcastConfig(heartbeat_s=0.05), peer_timeout_s=2.0)
    stack.callback(made.close)
    return made


def start(script: str, stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def start_worker(endpoints: tuple[str, str], stack: ExitStack, chunk: int = 4 << 20):
    return start_workers(1, endpoints, stack, chunk)[0]


def start_workers(
    count: int,
    endpoints: tuple[str, str],
    stack: ExitStack,
    chunk: int = 4 << 20,
    script: str = WORKER,
) -> list[subprocess.Popen[str]]:
    processes = [start(script, stack, *endpoints, str(chunk)) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return processes


def read_until(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == number:
            return
    raise AssertionError("the worker ended")


def test_a_worker_killed_while_it_fetches_disturbs_nobody(
    weight_server: WeightServer, endpoints: tuple[str, str], stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(endpoints, stack, BroadcastConfig(timeout_s=0.5), silence_s=0.5)
    weight_server.publish(make_version(1, rows=100_000))
    await_version(subscriber, 1)
    before = weight_server.stats.chunks
    victim = start_worker(endpoints, stack, chunk=200)  # 40,000 chunks: far from done when killed
    while weight_server.stats.chunks < before + 10:
        time.sleep(0.001)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    fetched = weight_server.stats.chunks - before
    assert fetched < 40_000
    weight_server.publish(make_version(2, rows=100_000))
    await_version(subscriber, 2)
    read_until(start_worker(endpoints, stack), 2)


def test_a_stopped_worker_holds_up_nobody_and_catches_up(
    weight_server: WeightServer, endpoints: tuple[str, str], stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(endpoints, stack, BroadcastConfig(timeout_s=0.5), silence_s=0.5)
    worker = start_worker(endpoints, stack)
    weight_server.publish(make_version(0))
    read_until(worker, 0)
    worker.send_signal(signal.SIGSTOP)
    for number in range(1, 60):
        weight_server.publish(make_version(number))
        await_version(subscriber, number)
    assert subscriber.stats.fetch.fetches == 1, "the other worker lost no delta"
    time.sleep(2.5)  # long enough for ZeroMQ to give the stopped peer up
    worker.send_signal(signal.SIGCONT)
    weight_server.publish(make_version(60))
    read_until(worker, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_six_stopped_workers_cost_the_other_ten_nothing(
    weight_server: WeightServer, endpoints: tuple[str, str], stack: ExitStack, make_version: Make
) -> None:
    subscribers = [
        follow(endpoints, stack, BroadcastConfig(timeout_s=0.5), silence_s=0.5) for _ in range(10)
    ]
    workers = start_workers(6, endpoints, stack)
    weight_server.publish(make_version(0))
    for worker in workers:
        read_until(worker, 0)
        worker.send_signal(signal.SIGSTOP)
    for number in range(1, 40):
        weight_server.publish(make_version(number))
        for subscriber in subscribers:
            await_version(subscriber, number)
    for worker in workers:
        worker.send_signal(signal.SIGCONT)
    weight_server.publish(make_version(40))
    for worker in workers:
        read_until(worker, 40)


def test_a_worker_that_is_given_up_while_it_is_busy_goes_on(
    endpoints: tuple[str, str], stack: ExitStack, make_version: Make
) -> None:
    """A full queue, a ping behind it and a peer that hangs up: libzmq 4.3.5 aborts there."""
    weight_server = WeightServer(*endpoints, BroadcastConfig(heartbeat_s=0.05), peer_timeout_s=1.0)
    stack.callback(weight_server.close)
    (worker,) = start_workers(1, endpoints, stack, script=BUSY_WORKER)
    weight_server.publish(make_version(0))
    read_until(worker, 0)
    worker.send_signal(signal.SIGSTOP)
    for number in range(1, 60):
        weight_server.publish(make_version(number))
        time.sleep(0.01)
    time.sleep(1.5)
    worker.send_signal(signal.SIGCONT)
    read_until(worker, 59)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_killed_and_started_again_is_followed(
    endpoints: tuple[str, str], stack: ExitStack
) -> None:
    subscriber = follow(endpoints, stack, BroadcastConfig(timeout_s=0.5), silence_s=0.5)
    for epoch in ("a", "b", "c"):
        learner = start(LEARNER, stack, *endpoints, epoch)
        version = collect(
            subscriber, lambda v, e=epoch: v.manifest.epoch == e and v.manifest.version > 5
        )[-1]
        number = version.manifest.version % 100
        assert torch.equal(version.tensors["t"], torch.full((1 << 20,), number, dtype=torch.int8))
        learner.send_signal(signal.SIGKILL)
        learner.wait()
    assert subscriber.stats.epochs == 3
    assert subscriber.stats.fetch.mismatches == subscriber.stats.mismatches == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc"
)
def test_memory_does_not_grow_over_a_thousand_versions(
    weight_server: WeightServer, endpoints: tuple[str, str], stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow(endpoints, stack, BroadcastConfig(timeout_s=0.5), silence_s=0.5)
    stopped = start_worker(endpoints, stack)
    weight_server.publish(make_version(0, rows=3000))
    read_until(stopped, 0)
    stopped.send_signal(signal.SIGSTOP)
    base = 0
    for number in range(1, 1301):
        weight_server.publish(make_version(number, rows=3000))
        if number % 10 == 0:
            await_version(subscriber, number)
        if number == 300:
            base = resident_bytes()
    # 1,000 payloads are 240 MB; what is kept is a handful of them.
    assert resident_bytes() - base < 24 << 20
