"""Relays between learner and workers: the same bytes, whatever is killed in between."""

import re
import signal
import subprocess
import sys

import msgspec
import pytest
import zmq
from helpers.weight_sync import WeightSync, arrive, assert_same, await_true, collect, free_endpoints

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.messages import Announce

CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=0.3, chunk_bytes=5000)


def test_a_tree_of_relays_gives_the_same_bytes(sync: WeightSync) -> None:
    sync.config = msgspec.structs.replace(CONFIG, timeout_s=60.0)  # what is late is asked for again
    top = sync.relay(sync.server.endpoints, sync.at("top"))
    leaves = [sync.relay(top.endpoints, sync.at(f"leaf{i}")) for i in range(2)]
    subscribers = [sync.follow(leaf.endpoints) for leaf in leaves for _ in range(4)]
    for number in range(6):
        sync.bring(number, *subscribers)
    arrive(sync.follow(leaves[0].endpoints), sync.version(5))
    stats = sync.server.stats
    assert stats.subscribers == 1 and stats.fetches == 1, "whatever is behind it"
    assert all(r.stats.fetch.fetches == 1 and r.stats.deltas == 5 for r in subscribers)


def test_a_relay_passes_deltas_on_as_they_came(sync: WeightSync) -> None:
    middle = sync.relay(sync.server.endpoints, sync.at("m"))
    subscriber = sync.follow(middle.endpoints)
    for number in range(5):
        sync.bring(number, subscriber)
    stats = (
        middle._server.stats
    )  # counted once all are sent, which may be after the first has arrived
    await_true(lambda: stats.delta_bytes == sync.server.stats.delta_bytes, stats)
    status = middle.status()
    assert (status["version"], status["subscribers"], status["behind_s"]) == (4, 1, 0.0)
    assert status["received"] == 5 and status["refused"] == status["stalls"] == 0
    # What a worker behind the relay needs is there.
    first = sync.version(0).manifest
    links = middle._server._handler._deltas.since(first.epoch, first.version, first.digest)
    assert [link.new.version for link in links] == [1, 2, 3, 4]


@pytest.mark.parametrize("relayed", [False, True])
def test_a_restarted_learner_with_lower_numbers_is_followed(
    sync: WeightSync, relayed: bool
) -> None:
    ends = sync.relay(sync.server.endpoints, sync.at("m")).endpoints if relayed else sync.at()
    subscriber = sync.follow(ends)
    sync.bring(9, subscriber)
    sync.server.close()
    sync.server = sync.serve()
    arrive(subscriber, sync.publish(3, epoch="b"))
    assert subscriber.stats.epochs == 2


@pytest.mark.timeout(60)
def test_a_relay_killed_and_started_again_is_followed(sync: WeightSync) -> None:
    listen = free_endpoints()
    subscriber = sync.follow(listen)
    for numbers in ((0, 1, 2), (3, 4, 5)):
        process = sync.relay_process(listen)
        for number in numbers:
            sync.bring(number, subscriber)
        process.kill()
        process.wait()
    assert subscriber.stats.fetch.mismatches == subscriber.stats.mismatches == 0
    assert subscriber.stats.epochs == 1, "the learner is the same one"


def test_a_relay_that_holds_an_earlier_run_gives_nothing(
    sync: WeightSync, caplog: pytest.LogCaptureFixture
) -> None:
    """Its numbers may be those of the new run's next versions, so that nothing else would tell them apart."""
    listen = free_endpoints()
    sync.relay_process(listen)
    arrive(sync.follow(listen, run_id="first"), sync.publish(0, run_id="first"))
    sync.server.close()
    worker = sync.follow(listen, run_id="second")
    await_true(lambda: worker.stats.refused > 2, worker.stats)
    assert worker.latest() is None and worker.stats.fetch.fetches == 0
    sync.server = sync.serve()
    wanted = sync.publish(0, run_id="second", epoch="b", rows=200)
    assert_same(collect(worker, lambda version: True)[0], wanted)
    assert caplog.text.count("refused: its id is first, this worker's run has second") == 1


def test_a_manifest_is_refused_where_the_announcement_has_no_id(sync: WeightSync) -> None:
    """A relay of a program that knows no ids announces none, and passes the manifest on as it came."""
    digest = sync.publish(3, run_id="first").manifest.digest
    told = messages.encode(Announce(run="run", epoch="a", version=3, digest=digest))
    announcer = sync.socket(zmq.PUB, sync.at("older").announce, bind=True)
    ends = sync.at("older").announce, sync.server.endpoints.fetch
    worker = sync.follow(ends, run_id="second")

    def refused() -> bool:
        announcer.send(told)
        return worker.stats.refused > 0

    await_true(refused, worker.stats)
    assert worker.latest() is None and worker.stats.fetch.fetches == 0


def test_weights_without_an_id_are_taken(sync: WeightSync) -> None:
    worker = sync.follow(run_id="second")
    for number in range(2):
        sync.bring(number, worker)


def test_a_relay_says_how_it_is_and_ends_in_peace(sync: WeightSync) -> None:
    process = sync.relay_process(free_endpoints())
    sync.publish(4)
    assert process.stderr is not None
    health = (line for line in process.stderr if "version=4" in line)
    assert re.search(r"version=4 subscribers=0 received=1 behind_s=0 stalls=0", next(health))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM


def test_a_bad_setting_of_a_relay_exits_2_with_one_line() -> None:
    command = [sys.executable, "-m", "areal_q", "relay", "--from-announce", "tcp://127.0.0.1:1"]
    command += ["--from-fetch", "tcp://127.0.0.1:2", "broadcast.hold=0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "broadcast.hold" in result.stderr
