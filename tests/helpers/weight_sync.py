"""Steps that the tests of weight sync share: serve, follow, wait for a version, compare it bit for bit."""

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from helpers.commands import limit

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.system.ports import free_ports
from areal_q.weights.version import WeightVersion
from bench.chaos import lies
from buffer.weight_sync import Endpoints, WeightServer, WeightSource, WeightSubscriber
from buffer.weight_sync.commands.relay import Relay
from buffer.weight_sync.curve import ClientKeys

PATIENT_S = 1000.0
"""Seconds of silence that no test lasts"""
LOOPBACK = Endpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


class WeightSync:
    """Servers, subscribers, relays and bare sockets of one test, which are closed at its end.

    All have the settings of `config`, except where a call names another value; `version` is the fixture
    make_version.
    """

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        version: Callable[..., WeightVersion],
        config: BroadcastConfig,
    ) -> None:
        self.stack, self.version, self.config = stack, version, config
        self._directory = directory

    def at(self, name: str = "") -> Endpoints:
        """Returns endpoints that only this test uses."""
        return Endpoints(f"ipc://{self._directory}/{name}a", f"ipc://{self._directory}/{name}f")

    @cached_property
    def server(self) -> WeightServer:
        """The learner's server at `at()`, started when it is first needed."""
        return self.serve()

    def serve(
        self, at: Endpoints | None = None, peer_timeout_s: float = 10.0, **settings: Any
    ) -> WeightServer:
        config = msgspec.structs.replace(self.config, **settings)
        made = WeightServer(*at or self.at(), config, peer_timeout_s=peer_timeout_s)
        self.stack.callback(made.close)
        return made

    def follow(
        self, at: tuple[str, str] | None = None, keys: ClientKeys | None = None,
        silence_s: float = PATIENT_S, run_id: str = "", **settings: Any,
    ) -> WeightSubscriber:  # fmt: skip
        """Starts a subscriber of run "run"; by default of `server`. It keeps a connection that is silent, as a
        busy machine's is for seconds, unless `silence_s` is given."""
        config = msgspec.structs.replace(self.config, **settings)
        ends = at or self.server.endpoints
        made = WeightSubscriber(
            *ends, run="run", run_id=run_id, config=config, keys=keys, silence_s=silence_s
        )
        self.stack.callback(made.close)
        return made

    def relay(self, upstream: WeightSource | Endpoints, listen: Endpoints) -> Relay:
        source = upstream if isinstance(upstream, WeightSource) else WeightSource(*upstream)
        made = Relay(source, listen, self.config)
        self.stack.callback(made.close)
        return made

    def relay_process(
        self, listen: Endpoints, upstream: Endpoints | None = None
    ) -> subprocess.Popen[str]:
        """Starts a relay as a process of its own, by default of `server`, and waits until it relays."""
        upstream = upstream or self.server.endpoints
        command = [sys.executable, "-m", "buffer.weight_sync.commands.relay", "--every-s", "0.2"]
        command += ["--from-announce", upstream.announce, "--from-fetch", upstream.fetch]
        command += ["--announce", listen.announce, "--fetch", listen.fetch]
        command += ["broadcast.heartbeat_s=0.05", "broadcast.timeout_s=0.3"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        self.stack.callback(process.stderr.close)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        assert "relaying" in process.stderr.readline()
        return process

    def publish(self, *numbers: int, **fields: Any) -> WeightVersion:
        """Publishes these versions, each once the one before it is visible; returns the last."""
        versions = [self.version(number, **fields) for number in numbers]
        for version in versions:
            publish(self.server, version)
        return versions[-1]

    def bring(self, number: int, *subscribers: WeightSubscriber) -> None:
        """Publishes the version and waits until each of them has it, bit for bit."""
        version = self.publish(number)
        for subscriber in subscribers:
            arrive(subscriber, version)

    def socket(
        self, kind: int, endpoint: str, *, keys: ClientKeys | None = None, bind: bool = False,
        queued: int = 1000,
    ) -> zmq.Socket:  # fmt: skip
        """Opens a bare ZeroMQ socket with room for so many messages; a SUB socket hears everything."""
        context = self.stack.enter_context(zmq.Context())
        sock = self.stack.enter_context(context.socket(kind))
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, 5000)
        sock.setsockopt(zmq.RCVHWM, queued)
        if keys is not None:
            keys.apply(sock)
        if kind == zmq.SUB:
            sock.subscribe(b"")
        if kind == zmq.XPUB:
            sock.setsockopt(zmq.XPUB_VERBOSE, 1)
        sock.bind(endpoint) if bind else sock.connect(endpoint)
        return sock

    def ask(self, request: msgspec.Struct) -> object:
        """Returns the server's answer to `request`."""
        dealer = self.socket(zmq.DEALER, self.server.endpoints.fetch)
        dealer.send(messages.encode(request))
        return messages.decode_reply(dealer.recv())


class Proxy(lies.Proxy):
    """A proxy before the server of `sync`, closed at the test's end."""

    def __init__(self, sync: WeightSync) -> None:
        super().__init__(sync.server.endpoints, sync.at("p"))
        sync.stack.callback(self.close)


def free_endpoints() -> Endpoints:
    return Endpoints(*(f"tcp://127.0.0.1:{port}" for port in free_ports(2)))


def await_true(condition: Callable[[], bool], what: object = "") -> None:
    """Waits until `condition` holds; fails with `what` where it never does."""
    while not condition():
        assert time.monotonic() < limit.at_s, what
        time.sleep(0.002)


def publish(server: WeightServer, version: WeightVersion) -> None:
    """Publishes `version` and waits until it is visible, so that none is skipped."""
    before = server.stats.published
    server.publish(version)
    await_true(lambda: server.stats.published == before + 1, server.stats)


def collect(
    subscriber: WeightSubscriber, is_last: Callable[[WeightVersion], bool]
) -> list[WeightVersion]:
    """Returns the versions handed over until the first for which `is_last` holds, that one included."""
    seen: list[WeightVersion] = []

    def arrived() -> bool:
        if (version := subscriber.latest()) is not None:
            seen.append(version)
        return bool(seen) and is_last(seen[-1])

    await_true(arrived, subscriber.stats)
    return seen


def collect_until(subscriber: WeightSubscriber, number: int) -> list[WeightVersion]:
    """Returns the versions handed over until number `number` arrives."""
    return collect(subscriber, lambda version: version.manifest.version == number)


def await_version(subscriber: WeightSubscriber, number: int) -> WeightVersion:
    """Returns version `number` once it is handed over."""
    return collect_until(subscriber, number)[-1]


def arrive(subscriber: WeightSubscriber, wanted: WeightVersion) -> None:
    """Waits for `wanted` and checks its bytes."""
    assert_same(collect(subscriber, lambda v: v.manifest == wanted.manifest)[-1], wanted)


def assert_same(received: WeightVersion, published: WeightVersion) -> None:
    """Checks that manifest, names, types, shapes and every bit are equal."""
    assert received.manifest == published.manifest
    assert list(received.tensors) == list(published.tensors)
    for name, tensor in published.tensors.items():
        got = received.tensors[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(_bits(got), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
