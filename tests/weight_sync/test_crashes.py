"""Either side ends at every point of the protocol, without a last word, and is started again.

A process that has imported everything forks the ones that end: each wraps one method of the real thing, and
leaves by os._exit before or after its n-th call.
"""

import asyncio
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import torch
import zmq
from helpers.weight_sync import follow

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import FetchDeltas
from areal_q.weights import version as weights
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer, WeightSubscriber

CONFIG = BroadcastConfig(heartbeat_s=0.05, chunk_bytes=4096, credit=2, timeout_s=0.5)
LAST = 3
"""Versions that a learner publishes"""

HANDLER = "buffer.weight_sync.request_handler"
PUBLISHER = "buffer.weight_sync.server"
SUBSCRIBER = "buffer.weight_sync.subscriber"

OF_A_LEARNER = {
    "before the first version is visible": (HANDLER, "RequestHandler.add_version", "before", 1),
    "after it is visible, before it is announced": (HANDLER, "RequestHandler.add_version", "after", 1),
    "after the announcement": (PUBLISHER, "WeightServer._announce_if_due", "after", 2),
    "before the answer to a newcomer": (HANDLER, "RequestHandler._reply", "before", 1),
    "between manifest and chunks": (HANDLER, "RequestHandler._reply", "after", 1),
    "before the first chunk": (HANDLER, "RequestHandler._send_chunk", "before", 1),
    "in the middle of the chunks": (HANDLER, "RequestHandler._send_chunk", "after", 3),
    "after the last chunk": (HANDLER, "RequestHandler._send_chunk", "after", 6),
    "while a delta is made": ("areal_q.weights.delta", "diff", "before", 1),
    "after a delta is made, before it is sent": ("areal_q.weights.delta", "diff", "after", 1),
    "after a delta is sent, before it is announced": (HANDLER, "RequestHandler.add_version", "after", 2),
    "before deltas are added up": (HANDLER, "RequestHandler._catch_up", "before", 1),
    "after they were added up, before the answer": (
        HANDLER, "RequestHandler._send_catch_up", "before", 1
    ),
}  # fmt: skip

OF_A_WORKER = {
    "before it connects": (SUBSCRIBER, "WeightSubscriber._subscribe", "before", 1),
    "at the first announcement": (SUBSCRIBER, "WeightSubscriber._on_broadcast", "before", 1),
    "after it asked for the manifest": (
        "buffer.weight_sync.fetcher",
        "Fetcher._ask",
        "after",
        1,
    ),
    "when the manifest is there": (
        "buffer.weight_sync.fetcher",
        "Fetcher._begin",
        "before",
        1,
    ),
    "after it asked for chunks": (
        "buffer.weight_sync.fetcher",
        "Fetcher._begin",
        "after",
        1,
    ),
    "before the first chunk": (
        "buffer.weight_sync.chunks",
        "ChunkBuffer.receive",
        "before",
        1,
    ),
    "in the middle of the chunks": (
        "buffer.weight_sync.chunks",
        "ChunkBuffer.receive",
        "after",
        3,
    ),
    "before the last chunk is verified": (
        "areal_q.weights.version",
        "Verifier.advance",
        "before",
        6,
    ),
    "after a snapshot is verified": ("areal_q.weights.version", "Verifier.finish", "after", 1),
    "before it is handed over": ("buffer.weight_sync.latest", "LatestValue.put", "before", 1),
    "after it is handed over": ("buffer.weight_sync.latest", "LatestValue.put", "after", 1),
    "when the engine has it, before the swap": (
        "buffer.weight_sync.latest",
        "LatestValue.take",
        "after",
        2,
    ),
    "before a delta is applied": ("areal_q.weights.delta", "apply", "before", 1),
    "in the middle of a delta": ("areal_q.weights.delta", "unpack_unnamed", "before", 1),
    "after a delta is applied": ("areal_q.weights.delta", "apply", "after", 1),
    "after a delta is handed over": ("buffer.weight_sync.latest", "LatestValue.put", "after", 2),
}


def version_of(number: int, epoch: str) -> WeightVersion:
    codes = torch.arange(24_000).remainder(251).to(torch.uint8)
    codes[: 10 * number] += number
    return weights.pack(
        {"codes": codes, "epoch": torch.tensor(list(epoch.encode()))},
        run="run", epoch=epoch, version=number, format="int8", uaq_scale=1.0, model={}, published_s=0.0,
    )  # fmt: skip


def ending(module: str, name: str, when: str, call: int) -> None:
    """This process ends before or after that call of that function."""
    owner = importlib.import_module(module)
    *parents, name = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    wrapped, calls = getattr(owner, name), 0

    @functools.wraps(wrapped)
    def end(*args, **kwargs):
        nonlocal calls
        calls += 1
        if (calls, when) == (call, "before"):
            leave()
        result = wrapped(*args, **kwargs)
        if (calls, when) == (call, "after"):
            leave()
        return result

    setattr(owner, name, end)


def leave() -> None:
    say("ended")
    os._exit(9)


def say(*words: object) -> None:
    """A whole line at once, whichever thread says it, after the process's number."""
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\n").encode())


def learner(announce: str, fetch: str, epoch: str) -> None:
    weight_server = WeightServer(announce, fetch, CONFIG)
    for number in range(1, LAST + 1):
        weight_server.publish(version_of(number, epoch))
        say("published", number)
        while weight_server.stats.published < number:
            time.sleep(0.001)
        time.sleep(0.05)
    time.sleep(60)


def worker(announce: str, fetch: str, _: str) -> None:
    subscriber = WeightSubscriber(announce, fetch, run="run", config=CONFIG, silence_s=0.5)
    while True:
        version = asyncio.run(subscriber.wait())
        say("has", version.manifest.version, version.manifest.digest)


def fork_on_demand() -> None:
    """Forks a process for each line: its role, endpoints and epoch, and where it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, announce, fetch, epoch, where = json.loads(line)
        if os.fork() == 0:
            say("started")
            if where:
                ending(*where)
            {"learner": learner, "worker": worker}[role](announce, fetch, epoch)
            os._exit(0)


Point = tuple[str, str, str, int]


class Nursery:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A script's own path has no tests/helpers.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )

    def start(self, stack: ExitStack, role: str, *how: str | Point | None) -> "Child":
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([role, *how]) + "\n")
        self._process.stdin.flush()
        lines = iter(self._process.stdout)
        said = next(line.split() for line in lines if line.endswith(" started\n"))
        child = Child(int(said[0]), lines)
        stack.callback(child.kill)
        return child

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Child:
    def __init__(self, pid: int, lines: Iterator[str]) -> None:
        self._pid, self._lines = pid, lines

    def says(self, *wanted: str) -> str:
        """The first of these that it says; what others say meanwhile is lost."""
        for line in self._lines:
            pid, _, said = line.rstrip().partition(" ")
            if int(pid) == self._pid and said.startswith(wanted):
                return said
        raise AssertionError("the processes ended")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def arrives(subscriber: WeightSubscriber, wanted: WeightVersion) -> None:
    async def main() -> None:
        while (await subscriber.wait()).manifest.digest != wanted.manifest.digest:
            pass

    asyncio.run(asyncio.wait_for(main(), 200))


@pytest.mark.parametrize("point", OF_A_LEARNER)
def test_a_learner_that_ends_anywhere_is_followed_again(
    nursery: Nursery, endpoints: tuple[str, str], stack: ExitStack, point: str
) -> None:
    subscriber = follow(endpoints, stack, CONFIG, silence_s=0.5)
    first = nursery.start(stack, "learner", *endpoints, "a", OF_A_LEARNER[point])
    if (
        first.says("ended", f"published {LAST}") != "ended"
    ):  # nobody was behind: somebody who is asks
        base = version_of(1, "a").manifest
        dealer = stack.enter_context(zmq.Context()).socket(zmq.DEALER)
        stack.callback(dealer.close, 0)
        dealer.connect(endpoints[1])
        question = FetchDeltas(epoch="a", base=1, base_digest=base.digest)
        dealer.send(messages.encode(question))
        first.says("ended")
    nursery.start(stack, "learner", *endpoints, "b", None)
    arrives(subscriber, version_of(LAST, "b"))
    assert subscriber.stats.mismatches == subscriber.stats.fetch.mismatches == 0


@pytest.mark.parametrize("point", OF_A_WORKER)
def test_a_worker_that_ends_anywhere_disturbs_nobody(
    nursery: Nursery, endpoints: tuple[str, str], stack: ExitStack, point: str
) -> None:
    weight_server = WeightServer(*endpoints, CONFIG)
    stack.callback(weight_server.close)
    other = follow(endpoints, stack, CONFIG, silence_s=0.5)
    weight_server.publish(version_of(1, "a"))
    arrives(other, version_of(1, "a"))
    first = nursery.start(stack, "worker", *endpoints, "", OF_A_WORKER[point])
    if "delta" in point:
        first.says("has 1 ")
        weight_server.publish(version_of(2, "a"))
    first.says("ended")
    newest = version_of(LAST, "a")
    weight_server.publish(newest)
    arrives(other, newest)
    second = nursery.start(stack, "worker", *endpoints, "", None)
    second.says(f"has {LAST} {newest.manifest.digest}")
    assert other.stats.fetch.fetches == 1 and other.stats.fetch.retries == 0
    assert other.stats.mismatches == other.stats.fetch.mismatches == 0


if __name__ == "__main__":
    fork_on_demand()
