"""Workers some versions behind get the deltas they lack; what does not get on is told."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from helpers.weight_sync import arrive, await_true, follow, publish, serve

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import Announce, DeltasReply, FetchDeltas, FetchHeld, HeldReply
from areal_q.weights import version as weights
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import Endpoints, WeightServer, WeightSubscriber

Make = Callable[..., WeightVersion]
CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=1.0, chunk_bytes=1000, hold=2, hold_deltas=6)


class Herald:
    """Announces by hand, so that a test decides when a worker learns of a version."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/herald"
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.bind(self.endpoint)

    def await_follower(self) -> None:
        assert self._pub.recv() == b"\1"

    def tell(self, version: WeightVersion) -> None:
        m = version.manifest
        told = Announce(run=m.run, epoch=m.epoch, version=m.version, digest=m.digest)
        self._pub.send(messages.encode(told))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def herald(short_dir: Path, stack: ExitStack) -> Herald:
    made = Herald(short_dir)
    stack.callback(made.close)
    return made


@pytest.mark.parametrize("behind", [1, 2, 3, 6])
def test_a_worker_some_versions_behind_fetches_deltas_only(
    behind: int, endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    publish(weight_server, make_version(0))
    herald.tell(make_version(0))
    arrive(subscriber, make_version(0))
    for number in range(1, behind + 1):
        publish(weight_server, make_version(number))
    herald.tell(make_version(behind))
    arrive(subscriber, make_version(behind))
    assert (subscriber.stats.fetch.fetches, subscriber.stats.fetch.catch_ups) == (1, 1)
    assert subscriber.stats.fetch.catch_up_bytes < make_version(0).manifest.nbytes / 10


def test_a_worker_behind_all_deltas_held_fetches_a_snapshot(
    endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    publish(weight_server, make_version(0))
    herald.tell(make_version(0))
    arrive(subscriber, make_version(0))
    for number in range(1, 8):
        publish(weight_server, make_version(number))
    herald.tell(make_version(7))
    arrive(subscriber, make_version(7))
    assert (subscriber.stats.fetch.fetches, subscriber.stats.fetch.catch_ups) == (2, 0)


def follow_herald(
    herald: Herald, fetch: str, stack: ExitStack, **settings: float
) -> WeightSubscriber:
    config = msgspec.structs.replace(CONFIG, **settings)
    subscriber = follow((herald.endpoint, fetch), stack, config)
    herald.await_follower()
    return subscriber


def ask(weight_server: WeightServer, stack: ExitStack, request: msgspec.Struct) -> object:
    context = stack.enter_context(zmq.Context())
    dealer = stack.enter_context(context.socket(zmq.DEALER))
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVTIMEO, 5000)
    dealer.connect(weight_server.endpoints.fetch)
    dealer.send(messages.encode(request))
    return messages.decode_reply(dealer.recv())


def since(version: WeightVersion) -> FetchDeltas:
    m = version.manifest
    return FetchDeltas(epoch=m.epoch, base=m.version, base_digest=m.digest)


def test_one_delta_or_the_chain_whichever_is_smaller(
    endpoints: Endpoints, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    for number in range(5):
        publish(weight_server, make_version(number))
    reply = ask(weight_server, stack, since(make_version(1)))
    assert isinstance(reply, DeltasReply)
    assert [(d.base, d.version) for d in reply.deltas] == [(1, 4)]
    held = ask(weight_server, stack, FetchHeld())
    assert isinstance(held, HeldReply)
    chain = sum(v.delta_bytes or 0 for v in held.versions if v.version > 1)
    assert 0 < reply.sizes[0] < chain


def test_deltas_held_stay_below_their_limit(
    endpoints: Endpoints, stack: ExitStack, make_version: Make
) -> None:
    one = 200  # bytes of a delta of make_version, roughly
    config = msgspec.structs.replace(CONFIG, max_delta_bytes=2 * one)
    weight_server = serve(endpoints, stack, config)
    for number in range(6):
        publish(weight_server, make_version(number))
    held = ask(weight_server, stack, FetchHeld())
    assert isinstance(held, HeldReply)
    sizes = [v.delta_bytes for v in held.versions if v.delta_bytes is not None]
    assert sizes and sum(sizes) <= 2 * one and weight_server.stats.deltas == 5
    assert ask(weight_server, stack, since(make_version(0))) == DeltasReply()


def test_another_layout_breaks_the_chain(
    endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    for number, rows in ((0, 300), (1, 400), (2, 400)):
        publish(weight_server, make_version(number, rows=rows))
        if number == 0:
            herald.tell(make_version(0))
            arrive(subscriber, make_version(0))
    herald.tell(make_version(2, rows=400))
    arrive(subscriber, make_version(2, rows=400))
    assert (subscriber.stats.fetch.fetches, subscriber.stats.fetch.catch_ups) == (2, 0)
    assert ask(weight_server, stack, since(make_version(1, rows=400))) != DeltasReply()


def test_many_workers_behind_are_served_by_one_catch_up(
    endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscribers = [follow_herald(herald, weight_server.endpoints.fetch, stack) for _ in range(8)]
    publish(weight_server, make_version(0))
    herald.tell(make_version(0))
    for subscriber in subscribers:
        arrive(subscriber, make_version(0))
    for number in range(1, 5):
        publish(weight_server, make_version(number))
    herald.tell(make_version(4))
    for subscriber in subscribers:
        arrive(subscriber, make_version(4))
    assert weight_server.stats.catch_ups == 8
    assert weight_server._handler is not None and len(weight_server._handler._catch_ups) == 1


def test_a_stalled_sync_is_an_event_and_is_told_when_it_ends(
    endpoints: Endpoints,
    herald: Herald,
    stack: ExitStack,
    make_version: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    subscriber = follow_herald(herald, endpoints.fetch, stack, stall_s=0.2, timeout_s=0.1)
    assert subscriber.behind_s == 0.0
    for _ in range(4):
        herald.tell(make_version(3))
        time.sleep(0.1)
    await_true(lambda: subscriber.stats.stalls == 1, subscriber.stats)
    assert "sync stalled: version 3 is known, -1 is held" in caplog.text
    assert subscriber.behind_s > 0.2
    weight_server = serve(endpoints, stack, CONFIG)
    publish(weight_server, make_version(3))
    arrive(subscriber, make_version(3))
    assert subscriber.behind_s == 0.0 and subscriber.stats.stalls == 1
    assert "weights arrive again" in caplog.text


def test_a_delta_that_takes_too_long_is_left_out(
    endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, msgspec.structs.replace(CONFIG, stall_s=0.01))
    versions = [make_version(number) for number in range(2)]
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    late = threading.Event()
    stack.callback(late.set)
    weight_server._differ.submit(late.wait)  # what is in its way before the delta
    for version in versions:
        publish(weight_server, version)
        herald.tell(version)
        arrive(subscriber, version)
    assert (weight_server.stats.stalls, weight_server.stats.deltas) == (1, 0)


def test_weights_that_come_back_need_no_bytes_of_theirs(
    endpoints: Endpoints, herald: Herald, stack: ExitStack
) -> None:
    def version(number: int, value: int) -> WeightVersion:
        tensors = {"a": torch.full((50_000,), value, dtype=torch.int8)}
        fields = {"run": "run", "epoch": "a", "format": "int8", "uaq_scale": 1.0, "model": {}}
        return weights.pack(tensors, version=number, published_s=0.0, **fields)  # type: ignore[arg-type]

    weight_server = serve(endpoints, stack, CONFIG)
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    versions = [version(0, 5), version(1, 9), version(2, 5), version(3, 5)]
    for v in versions:
        publish(weight_server, v)
        if v is versions[0]:
            herald.tell(v)
            arrive(subscriber, v)
    herald.tell(versions[3])
    arrive(subscriber, versions[3])
    assert subscriber.stats.fetch.catch_up_bytes < 200
    assert (subscriber.stats.fetch.fetches, subscriber.stats.fetch.catch_ups) == (1, 1)


def test_workers_that_join_between_versions_follow_at_once(
    endpoints: Endpoints, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscribers: list[WeightSubscriber] = []
    for number in range(40):
        weight_server.publish(make_version(number))
        if number % 4 == 0:
            made = WeightSubscriber(*weight_server.endpoints, run="run", config=CONFIG)
            stack.callback(made.close)
            subscribers.append(made)
        time.sleep(0.01)
    for subscriber in subscribers:
        arrive(subscriber, make_version(39))
    assert all(r.stats.mismatches == r.stats.fetch.mismatches == 0 for r in subscribers)


def test_sixteen_workers_of_which_some_never_read_hold_up_nobody(
    endpoints: Endpoints, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    context = stack.enter_context(zmq.Context())
    publish(weight_server, make_version(0, rows=2000))
    digest = make_version(0, rows=2000).manifest.digest
    for _ in range(4):
        sub = stack.enter_context(context.socket(zmq.SUB))
        sub.setsockopt(zmq.RCVHWM, 1)
        sub.subscribe(b"")
        sub.connect(weight_server.endpoints.announce)
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(weight_server.endpoints.fetch)
        for offset in range(0, 150_000, 1000):
            request = messages.FetchChunk(digest=digest, offset=offset, nbytes=1000)
            dealer.send(messages.encode(request))
    subscribers = []
    for _ in range(12):
        subscribers.append(WeightSubscriber(*weight_server.endpoints, run="run", config=CONFIG))
        stack.callback(subscribers[-1].close)
    for subscriber in subscribers:
        arrive(subscriber, make_version(0, rows=2000))
    await_true(lambda: weight_server.stats.subscribers == 16, weight_server.stats)
    for number in range(1, 31):
        version = make_version(number, rows=2000)
        publish(weight_server, version)
        for subscriber in subscribers:
            arrive(subscriber, version)
    assert all(r.stats.fetch.fetches == 1 for r in subscribers)


def test_version_numbers_may_jump(
    endpoints: Endpoints, herald: Herald, stack: ExitStack, make_version: Make
) -> None:
    weight_server = serve(endpoints, stack, CONFIG)
    subscriber = follow_herald(herald, weight_server.endpoints.fetch, stack)
    for number in (3, 2**31 + 1, 2**62):
        publish(weight_server, make_version(number))
        herald.tell(make_version(number))
        arrive(subscriber, make_version(number))
    assert subscriber.stats.skipped == 2**62 - 3 - 2
    assert subscriber.stats.fetch.catch_ups == 2
