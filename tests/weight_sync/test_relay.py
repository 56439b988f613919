"""Relays between learner and workers: the same bytes, whatever is killed in between."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from helpers.weight_sync import arrive, follow, serve

from areal_q.config import BroadcastConfig
from areal_q.system.ports import free_ports
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import Endpoints, WeightSource
from buffer.weight_sync.commands.relay import Relay

Make = Callable[..., WeightVersion]
CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=0.3, chunk_bytes=5000)
OVERRIDES = ["broadcast.heartbeat_s=0.05", "broadcast.timeout_s=0.3"]


def at(directory: Path, name: str) -> Endpoints:
    return Endpoints(f"ipc://{directory}/{name}a", f"ipc://{directory}/{name}f")


def relay(upstream: Endpoints, listen: Endpoints, stack: ExitStack) -> Relay:
    made = Relay(WeightSource(*upstream), listen, CONFIG)
    stack.callback(made.close)
    return made


def test_a_tree_of_relays_gives_the_same_bytes(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    learner = serve(at(short_dir, "l"), stack, CONFIG)
    top = relay(learner.endpoints, at(short_dir, "t"), stack)
    leaves = [relay(top.endpoints, at(short_dir, f"r{i}"), stack) for i in range(2)]
    subscribers = [
        follow(leaf.endpoints, stack, CONFIG, silence_s=0.5) for leaf in leaves for _ in range(4)
    ]
    for number in range(6):
        learner.publish(make_version(number))
        for subscriber in subscribers:
            arrive(subscriber, make_version(number))
    late = follow(leaves[0].endpoints, stack, CONFIG, silence_s=0.5)
    arrive(late, make_version(5))
    assert learner.stats.subscribers == 1 and learner.stats.fetches == 1, "whatever is behind it"
    assert all(r.stats.fetch.fetches == 1 and r.stats.deltas == 5 for r in subscribers)


def test_a_relay_passes_deltas_on_as_they_came(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    learner = serve(at(short_dir, "l"), stack, CONFIG)
    middle = relay(learner.endpoints, at(short_dir, "m"), stack)
    subscriber = follow(middle.endpoints, stack, CONFIG, silence_s=0.5)
    for number in range(4):
        learner.publish(make_version(number))
        arrive(subscriber, make_version(number))
    assert middle._server.stats.delta_bytes == learner.stats.delta_bytes
    status = middle.status()
    assert (status["version"], status["subscribers"], status["behind_s"]) == (3, 1, 0.0)
    assert status["received"] == 4 and status["refused"] == status["stalls"] == 0


def test_a_relay_serves_those_that_are_behind(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    learner = serve(at(short_dir, "l"), stack, CONFIG)
    middle = relay(learner.endpoints, at(short_dir, "m"), stack)
    watcher = follow(middle.endpoints, stack, CONFIG, silence_s=0.5)
    learner.publish(make_version(0))
    arrive(watcher, make_version(0))
    for number in range(1, 5):
        learner.publish(make_version(number))
        arrive(watcher, make_version(number))
    held = middle._server._handler
    assert held is not None
    first = make_version(0).manifest
    links = held._deltas.since(first.epoch, first.version, first.digest)
    assert [link.new.version for link in links] == [1, 2, 3, 4]


def free_endpoints() -> Endpoints:
    return Endpoints(*(f"tcp://127.0.0.1:{port}" for port in free_ports(2)))


def start(upstream: Endpoints, listen: Endpoints, stack: ExitStack) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "buffer.weight_sync.commands.relay",
        "--every-s",
        "0.2",
        *OVERRIDES,
    ]
    command += ["--from-announce", upstream.announce, "--from-fetch", upstream.fetch]
    command += ["--announce", listen.announce, "--fetch", listen.fetch]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    stack.callback(process.stderr.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert "relaying" in process.stderr.readline()
    return process


def test_a_relay_killed_and_started_again_is_followed(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    learner = serve(at(short_dir, "l"), stack, CONFIG)
    listen = free_endpoints()
    subscriber = follow(listen, stack, CONFIG, silence_s=0.5)
    for round in range(2):
        process = start(learner.endpoints, listen, stack)
        for number in range(round * 3, round * 3 + 3):
            learner.publish(make_version(number))
            arrive(subscriber, make_version(number))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subscriber.stats.fetch.mismatches == subscriber.stats.mismatches == 0
    assert subscriber.stats.epochs == 1, "the learner is the same one"


def test_a_learner_started_again_is_followed_through_a_relay(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    first = serve(at(short_dir, "l"), stack, CONFIG)
    middle = relay(first.endpoints, at(short_dir, "m"), stack)
    subscriber = follow(middle.endpoints, stack, CONFIG, silence_s=0.5)
    first.publish(make_version(7))
    arrive(subscriber, make_version(7))
    first.close()
    second = serve(at(short_dir, "l"), stack, CONFIG)
    second.publish(make_version(2, epoch="b"))
    arrive(subscriber, make_version(2, epoch="b"))


def test_a_relay_says_how_it_is_and_ends_in_peace(
    short_dir: Path, stack: ExitStack, make_version: Make
) -> None:
    learner = serve(at(short_dir, "l"), stack, CONFIG)
    process = start(learner.endpoints, free_endpoints(), stack)
    learner.publish(make_version(4))
    assert process.stderr is not None
    health = (line for line in process.stderr if "version=4" in line)
    assert re.search(r"version=4 subscribers=0 received=1 behind_s=0 stalls=0", next(health))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM


def test_a_bad_setting_of_a_relay_exits_2_with_one_line() -> None:
    command = [sys.executable, "-m", "areal_q", "relay", "--from-announce", "tcp://127.0.0.1:1"]
    command += ["--from-fetch", "tcp://127.0.0.1:2", "broadcast.hold=0"]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "broadcast.hold" in result.stderr
