"""Whoever connects to a weight server's ports and says nothing leaves it the files that it needs itself."""

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.commands import refused, run_here, wait_until
from helpers.weight_sync import LOOPBACK, WeightSync, arrive

from areal_q.checks.machine import open_files
from areal_q.config import BroadcastConfig
from areal_q.system.ports import allow_open_files, most_connections
from areal_q.weights.shared_memory import allocate, file_of
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import sockets
from buffer.weight_sync.commands import relay
from learner import __main__ as learner_main
from rollout import __main__ as rollout_main

CONFIG = BroadcastConfig(timeout_s=1.0, heartbeat_s=0.05)
MOST = 8


@pytest.fixture
def sync(
    short_dir: Path, stack: ExitStack, make_version: Callable[..., WeightVersion]
) -> WeightSync:
    return WeightSync(short_dir, stack, make_version, CONFIG)


def connected(endpoint: str, stack: ExitStack) -> socket.socket:
    """A connection; a port that does not listen just now is tried again."""
    at = urlsplit(endpoint)
    assert at.hostname and at.port
    while True:
        with suppress(ConnectionRefusedError, ConnectionResetError):
            return stack.enter_context(socket.create_connection((at.hostname, at.port)))
        time.sleep(0.01)


def held_of(peers: list[socket.socket]) -> int:
    return sum(map(is_held, peers))


def is_held(peer: socket.socket) -> bool:
    """Whether the server has not hung up."""
    peer.setblocking(False)
    try:
        while peer.recv(1000):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


@pytest.mark.parametrize("port", ["announce", "fetch"])
def test_silent_connections_are_bounded_and_workers_go_on(
    sync: WeightSync, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, port: str
):
    monkeypatch.setattr(sockets, "most_connections", lambda: MOST)
    server = sync.serve(LOOPBACK)
    worker = sync.follow(server.endpoints)
    peers: list[socket.socket] = []
    for number in range(3):
        peers += [connected(getattr(server.endpoints, port), stack) for _ in range(2 * MOST)]
        held = partial(held_of, peers)
        wait_until(lambda held=held: held() < MOST, held)
        version = sync.version(number)
        server.publish(version)
        arrive(worker, version)


@pytest.fixture
def files() -> Iterator[tuple[int, int]]:
    """The limits of open files, which are as they were after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_may_open_all_the_files_that_the_system_allows(files: tuple[int, int]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, files[1]))
    assert most_connections() == 256 // 4
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files[1], files[1])


NOWHERE = "redis://127.0.0.1:1"
SERVICES = {
    "learner": (learner_main.main, ["--redis", NOWHERE]),
    "rollout": (rollout_main.main, ["--redis", NOWHERE, "--run", "run", "--id", "w" * 300]),
    "relay": (
        relay.main,
        [
            "--from-announce",
            "tcp://127.0.0.1:1",
            "--from-fetch",
            "tcp://127.0.0.1:2",
            "broadcast.hold=0",
        ],
    ),
}
"""What each refuses, once it has begun"""


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_begins_by_allowing_itself_files(name: str, files: tuple[int, int]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, files[1]))
    main, given = SERVICES[name]
    refused(run_here(name, main, *given, who=name))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files[1], files[1])


def test_a_payload_is_ordinary_memory_where_no_file_opens(files: tuple[int, int]):
    """The limit is that of the next descriptor's number."""
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, files[1]))
    payload = allocate(10)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    assert payload.tolist() == [0] * 10 and file_of(payload) is None


@pytest.mark.parametrize(
    ("workers", "limit", "level"),
    [
        (1, 1024, "ok"),
        (256, 1024, "ok"),
        (257, 1024, "warning"),
        (1, 128, "warning"),
        (5000, resource.RLIM_INFINITY, "ok"),
    ],
)
def test_check_asks_whether_all_workers_can_connect(workers: int, limit: int, level: str):
    found = open_files(workers, limit)
    assert found.level == level, found
    if level == "warning":
        assert most_connections(int(found.fix.split()[2])) >= workers
