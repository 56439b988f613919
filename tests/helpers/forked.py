"""Learners and workers as processes of their own, forked from one that has imported everything.

Each can be told to end, without a last word, before or after the n-th call of a function of the real thing.
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
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from areal_q.config import BroadcastConfig
from areal_q.weights import version as weights
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer, WeightSubscriber

Point = tuple[str, str, str, int]
"""Module, function, "before" or "after", and the number of the call at which a process ends"""


def version_of(number: int, epoch: str, size: int = 24_000) -> WeightVersion:
    """Returns a version whose bytes are a function of the arguments, close to those of `number` - 1."""
    codes = torch.arange(size).remainder(251).to(torch.uint8)
    codes[: 10 * number] += number % 100
    return weights.pack_version(
        {"codes": codes, "epoch": torch.tensor(list(epoch.encode()))},
        run="run", epoch=epoch, version=number, format="int8", uaq_scale=1.0, model={}, published_s=0.0,
    )  # fmt: skip


def end_at(module: str, name: str, when: str, call: int) -> None:
    """Lets this process end before or after that call of that function."""
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
    """Writes a whole line at once, whichever thread says it, after the process's number."""
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\n").encode())


def learner(
    ends: tuple[str, str], config: BroadcastConfig, epoch: str, last: int, pause_s: float, size: int
) -> None:
    weight_server = WeightServer(*ends, config)
    for number in range(1, last + 1):
        weight_server.publish(version_of(number, epoch, size))
        if number == last:
            say("published all")
        while weight_server.stats.published < number:
            time.sleep(0.001)
        time.sleep(pause_s)
    time.sleep(60)


def worker(
    ends: tuple[str, str], config: BroadcastConfig, silence_s: float, busy_s: float = 0.0
) -> None:
    """Follows the learner; `busy_s` is how long the subscriber's thread is busy with version 0."""

    def busy(version: WeightVersion, _: object) -> None:
        say("got", version.manifest.version, "")
        if version.manifest.version == 0:
            time.sleep(busy_s)

    subscriber = WeightSubscriber(
        *ends, run="run", config=config, silence_s=silence_s, on_version=busy if busy_s else None
    )
    say("ready")
    while True:
        version = asyncio.run(subscriber.wait())
        say("has", version.manifest.version, version.manifest.digest)


def fork_on_demand() -> None:
    """Forks a process for each line: its role, endpoints and settings, and where it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, ends, settings, where, options = json.loads(line)
        if child := os.fork():
            os.write(1, f"0 {child}\n".encode())
            continue
        if where:
            end_at(*where)
        roles: dict[str, Callable[..., None]] = {"learner": learner, "worker": worker}
        roles[role](ends, BroadcastConfig(**settings), **options)
        os._exit(0)


class Nursery:
    """The process that forks the others, and what each of them has said."""

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
        self._said: defaultdict[int, deque[str]] = defaultdict(deque)

    def start(
        self, stack: ExitStack, role: str, ends: tuple[str, str], settings: dict[str, Any],
        where: Point | None = None, **options: Any,
    ) -> "Child":  # fmt: skip
        """Starts a learner or a worker, which `stack` kills; it ends at `where` by itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([role, ends, settings, where, options]) + "\n")
        self._process.stdin.flush()
        child = Child(self, int(self.next_line(0)))
        stack.callback(child.kill)
        return child

    def next_line(self, pid: int) -> str:
        """Returns the next line that the process said; 0 is the nursery itself."""
        assert self._process.stdout is not None
        while not self._said[pid]:
            line = self._process.stdout.readline()
            assert line, "the processes ended"
            who, _, said = line.rstrip("\n").partition(" ")
            self._said[int(who)].append(said)
        return self._said[pid].popleft()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Child:
    """A learner or a worker."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self._pid = nursery, pid

    def says(self, *wanted: str) -> str:
        """Returns the first of these that it says."""
        while not (said := self._nursery.next_line(self._pid)).startswith(wanted):
            pass
        return said

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


if __name__ == "__main__":
    fork_on_demand()
