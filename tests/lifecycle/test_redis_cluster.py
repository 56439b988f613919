"""Runs over a real Redis Cluster of three servers: each lies on one, whose kill holds up no other."""

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import limit
from redis.backoff import NoBackoff
from redis.retry import Retry

from areal_q.errors import ConfigError
from areal_q.messages import Group, Ticket
from areal_q.system.processes import die_with_parent
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.keys import Keys

SLOTS = 16384
SERVERS = 3
TICKETS = 4
HANG_S = 60.0
LOST_CLAIM_S = 3.0
"""Seconds after which a worker gets the tickets of a claim again whose answer was lost with a server"""


class Cluster:
    """Three primaries that share the slots, each with an append-only file."""

    def __init__(self, binary: str, directory: Path) -> None:
        self._binary, self._directory = binary, directory
        self._reserved, self.ports = _reserved_ports()
        # A command that is repeated after a time limit would find its slots taken.
        patient: dict[str, Any] = {"socket_timeout": HANG_S, "retry": Retry(NoBackoff(), 0)}
        self.clients = [redis.Redis(port=port, **patient) for port in self.ports]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def form(self) -> None:
        """Starts the servers and shares the slots among them."""
        for number in range(SERVERS):
            self.start(number)
        for number, client in enumerate(self.clients):
            share = range(number * SLOTS // SERVERS, (number + 1) * SLOTS // SERVERS)
            client.execute_command("CLUSTER", "ADDSLOTS", *share)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0])
        for client in self.clients:
            _until(lambda client=client: self._knows_all(client))

    def start(self, number: int) -> None:
        """Starts a server, which goes on with its data if it has any."""
        home = self._directory / str(number)
        home.mkdir(exist_ok=True)
        options = {"port": self.ports[number], "dir": home, "cluster-enabled": "yes", "save": ""}
        options |= {"bind": "127.0.0.1", "cluster-node-timeout": 60_000}
        # With everysec a busy disk may cost what was acknowledged in the last two seconds.
        options |= {"appendonly": "yes", "appendfsync": "always"}
        options |= {"cluster-require-full-coverage": "no"}
        told = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        with (home / "log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [self._binary, *told], stdout=log, stderr=log, preexec_fn=die_with_parent()
            )
        _until(lambda: self._answers(number))

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        for number in self._processes:
            self.kill(number)
        for client in self.clients:
            client.close()
        self._reserved.close()

    def url(self, number: int) -> str:
        return f"redis://127.0.0.1:{self.ports[number]}"

    def run_on(self, number: int) -> str:
        """Returns the name of a run whose keys lie on that server."""
        client = self.clients[0]
        for n in range(1000):
            slot: Any = client.execute_command("CLUSTER", "KEYSLOT", Keys(f"run{n}").info)
            if slot * SERVERS // SLOTS == number:
                return f"run{n}"
        raise AssertionError

    def _answers(self, number: int) -> bool:
        try:
            return bool(self.clients[number].ping())
        except redis.RedisError:
            return False

    def _knows_all(self, client: redis.Redis) -> bool:
        found: Any = client.execute_command("CLUSTER", "INFO")
        text = found if isinstance(found, str) else str(found)
        return "ok" in text and "16384" in text and _nodes(client) == SERVERS


def _nodes(client: redis.Redis) -> int:
    found: Any = client.execute_command("CLUSTER", "SLOTS")
    return len(found)


def _reserved_ports() -> tuple[socket.socket, list[int]]:
    """Returns ports that nobody uses, nor those that follow them by 10,000, over which the servers talk, and
    the socket that keeps them from other processes of these tests, also while a server is dead."""
    for number in range(900):
        ports = [20_000 + SERVERS * number + server for server in range(SERVERS)]
        reserved = socket.socket()
        try:
            reserved.bind(("127.0.0.1", 25_000 + number))
            for port in (*ports, *(port + 10_000 for port in ports)):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
            return reserved, ports
        except OSError:
            reserved.close()
    raise AssertionError("no free ports")


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        assert time.monotonic() < limit.at_s
        time.sleep(0.05)


@pytest.fixture(scope="module", params=["redis 6.2", "redis 7", "valkey 9"])
def cluster(
    request: pytest.FixtureRequest,
    binary_of: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    binary = binary_of(request.param)
    with closing(Cluster(binary, tmp_path_factory.mktemp("cluster"))) as made:
        made.form()
        yield made


async def commit_all(url: str, run: str, make_group: Callable[..., Group]) -> int:
    """Claims and commits the run's tickets one by one; returns how many."""
    worker = WorkerBuffer(url, run, "w", LOST_CLAIM_S, patience_s=HANG_S)
    committed, claims = 0, []
    # An outage that takes longer leaves a claim with nothing.
    while not claims:
        claims = await worker.claim(TICKETS, 5.0)
    for claim in claims:
        committed += await worker.commit(claim, make_group(claim.ticket))
    await worker.close()
    return committed


def begin(url: str, run: str, make_ticket: Callable[..., Ticket]) -> LearnerBuffer:
    """Returns the learner of a new run with TICKETS open tickets."""
    learner = LearnerBuffer(url, run, patience_s=HANG_S)
    learner.forget()
    learner.publish_run("", {})
    learner.admit([make_ticket(n, run=run) for n in range(TICKETS)], TICKETS)
    return learner


def assert_all_taken(learner: LearnerBuffer) -> None:
    assert [group.ticket.number for group in learner.take(TICKETS, 5.0)] == list(range(TICKETS))
    learner.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(SERVERS))
def test_who_names_another_server_is_told_the_run_s_own(
    cluster: Cluster, make_ticket: Callable[..., Ticket], make_group, number: int
) -> None:
    run, wrong = cluster.run_on(number), cluster.url((number + 1) % SERVERS)
    mistaken = LearnerBuffer(wrong, run, patience_s=HANG_S)
    with pytest.raises(ConfigError, match=f"name the one that has, .*:{cluster.ports[number]}"):
        mistaken.forget()
    mistaken.close()

    async def claim() -> None:
        worker = WorkerBuffer(wrong, run, "w", LOST_CLAIM_S, patience_s=HANG_S)
        with pytest.raises(ConfigError, match=f":{cluster.ports[number]}"):
            await worker.claim(1, 0.0)
        await worker.close()

    asyncio.run(claim())
    learner = begin(cluster.url(number), run, make_ticket)
    assert asyncio.run(commit_all(cluster.url(number), run, make_group)) == TICKETS
    assert_all_taken(learner)


@pytest.mark.timeout(60)
def test_a_killed_server_holds_up_only_its_own_runs(
    cluster: Cluster, make_ticket: Callable[..., Ticket], make_group
) -> None:
    mine, other = cluster.run_on(1), cluster.run_on(2)
    held, free = (begin(cluster.url(n), run, make_ticket) for n, run in ((1, mine), (2, other)))
    cluster.kill(1)
    assert asyncio.run(commit_all(cluster.url(2), other, make_group)) == TICKETS
    assert_all_taken(free)
    cluster.start(1)
    assert asyncio.run(commit_all(cluster.url(1), mine, make_group)) == TICKETS
    assert_all_taken(held)
