"""Steps that the tests of weight sync share: serve, follow, wait for a version, compare it bit for bit."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import zmq

from areal_q.config import BroadcastConfig
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import WeightServer, WeightSubscriber
from buffer.weight_sync.curve import ClientKeys

HANG_S = 120.0
"""Seconds after which a wait counts as a hang."""


def await_true(condition: Callable[[], bool], what: object = "") -> None:
    """Waits until `condition` holds; fails with `what` where it never does."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def serve(
    endpoints: tuple[str, str],
    stack: ExitStack,
    config: BroadcastConfig | None = None,
    **options: Any,
) -> WeightServer:
    """Starts a weight server, which `stack` closes."""
    made = WeightServer(*endpoints, config, **options)
    stack.callback(made.close)
    return made


def follow(
    endpoints: tuple[str, str],
    stack: ExitStack,
    config: BroadcastConfig | None = None,
    **options: Any,
) -> WeightSubscriber:
    """Starts a subscriber of run "run", which `stack` closes."""
    made = WeightSubscriber(*endpoints, run="run", config=config, **options)
    stack.callback(made.close)
    return made


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


def raw_socket(
    kind: int,
    endpoint: str,
    stack: ExitStack,
    keys: ClientKeys | None = None,
    bind: bool = False,
) -> zmq.Socket:
    """Opens a bare ZeroMQ socket, which `stack` closes; a SUB socket hears everything."""
    context = stack.enter_context(zmq.Context())
    sock = stack.enter_context(context.socket(kind))
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, 5000)
    if keys is not None:
        keys.apply(sock)
    if kind == zmq.SUB:
        sock.subscribe(b"")
    sock.bind(endpoint) if bind else sock.connect(endpoint)
    return sock


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
