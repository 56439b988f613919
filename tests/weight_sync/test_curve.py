"""With keys, only whoever is listed gets weights, and nobody in between can read them. Real sockets."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
from helpers.weight_sync import LOOPBACK, WeightSync, arrive, await_true

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import ConfigError
from areal_q.messages import FetchManifest
from buffer.weight_sync import Endpoints, WeightSource
from buffer.weight_sync.curve import ClientKeys, client_keys, make_keys, server_keys

CONFIG = BroadcastConfig(heartbeat_s=0.05, timeout_s=0.3)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def sync(sync: WeightSync, keys: Path) -> WeightSync:
    """Both ends on loopback; the server admits those whose keys are listed."""
    sync.config = msgspec.structs.replace(CONFIG, keys=str(keys))
    sync.server = sync.serve(LOOPBACK)
    return sync


def test_secret_keys_are_readable_by_their_owner_only(keys: Path) -> None:
    secrets = sorted(path.name for path in keys.rglob("*.key_secret"))
    assert secrets == ["server.key_secret", "worker.key_secret"]
    for path in keys.rglob("*.key_secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in (keys / "clients").iterdir()] == ["worker.key"]


def test_keys_are_added_but_never_replaced(keys: Path) -> None:
    server = (keys / "server.key").read_text()
    assert make_keys(keys, "rack-2") == [keys / "rack-2.key_secret"]
    assert (keys / "server.key").read_text() == server
    with pytest.raises(ConfigError, match="exists already"):
        make_keys(keys, "rack-2")
    for name in ("server", "../x", "", "a b"):
        with pytest.raises(ConfigError, match="name"):
            make_keys(keys, name)


def test_a_secret_that_others_can_read_is_refused(keys: Path) -> None:
    os.chmod(keys / "worker.key_secret", 0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        client_keys(keys)
    with pytest.raises(ConfigError, match="No such file"):
        client_keys(keys, "stranger")
    (keys / "server.key_secret").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"server\.key_secret"):
        server_keys(keys)


READ_KEYS = """
import os, sys
from areal_q.errors import ConfigError
from buffer.weight_sync.curve import client_keys
os.setgroups([]); os.setgid(10001); os.setuid(10001)
for directory in sys.argv[1:]:
    try:
        client_keys(directory)
        print("read")
    except ConfigError:
        print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
def test_a_secret_in_a_pod_is_read_by_our_group_alone(keys: Path, short_dir: Path) -> None:
    """As Kubernetes mounts them under an fsGroup: owner root, group ours."""
    expected = {0o440: "read", 0o400: "refused", 0o444: "refused"}
    for mode in expected:
        shutil.copytree(keys, short_dir / f"{mode:o}")
        for path in [short_dir, *(short_dir / f"{mode:o}").rglob("*")]:
            os.chown(path, 0, 10001)
            os.chmod(path, 0o750 if path.is_dir() else mode)
        os.chown(short_dir / f"{mode:o}", 0, 10001)
    command = [
        sys.executable,
        "-c",
        READ_KEYS,
        *(str(short_dir / f"{mode:o}") for mode in expected),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.split() == list(expected.values()), result.stderr


def test_a_listed_worker_follows_over_encrypted_sockets(sync: WeightSync, keys: Path) -> None:
    subscriber = sync.follow(keys=client_keys(keys))
    for number in range(3):
        sync.bring(number, subscriber)
    assert (subscriber.stats.fetch.fetches, subscriber.stats.deltas) == (1, 2)
    assert sync.server.stats.strangers == 0


@pytest.mark.parametrize("kind", ["no keys", "unknown key", "server's key guessed wrong"])
def test_an_unlisted_key_gets_no_announcement_and_no_answer(
    kind: str, sync: WeightSync, keys: Path, tmp_path: Path
) -> None:
    version = sync.publish(1)
    make_keys(tmp_path / "other")
    other, mine = client_keys(tmp_path / "other"), client_keys(keys)
    stranger = {
        "no keys": None,
        "unknown key": ClientKeys(other.public, other.secret, mine.server),
        "server's key guessed wrong": ClientKeys(mine.public, mine.secret, other.server),
    }[kind]
    sub = sync.socket(zmq.SUB, sync.server.endpoints.announce, keys=stranger)
    dealer = sync.socket(zmq.DEALER, sync.server.endpoints.fetch, keys=stranger)
    dealer.send(messages.encode(FetchManifest()))
    arrive(sync.follow(keys=mine), version)
    if kind == "unknown key":
        await_true(lambda: sync.server.stats.strangers > 0)
    # Ten heartbeats later a listed worker has long been served.
    assert not sub.poll(300) and not dealer.poll(300)
    await_true(lambda: sync.server.stats.subscribers == 1, sync.server.stats)
    assert sync.server.stats.refused == 0
    assert (sync.server.stats.strangers > 0) == (kind == "unknown key")


def test_a_worker_with_keys_takes_nothing_from_a_learner_without(
    sync: WeightSync, keys: Path
) -> None:
    sync.server = sync.serve(LOOPBACK, keys=None)
    sync.publish(1)
    subscriber = sync.follow(keys=client_keys(keys))
    time.sleep(0.5)
    assert subscriber.latest() is None and subscriber.stats.received == 0


def test_a_key_added_or_removed_counts_at_the_next_connection(sync: WeightSync, keys: Path) -> None:
    version = sync.publish(1)
    make_keys(keys, "late")
    arrive(sync.follow(keys=client_keys(keys, "late")), version)
    (keys / "clients" / "late.key").unlink()
    locked_out = sync.follow(keys=client_keys(keys, "late"))
    await_true(lambda: sync.server.stats.strangers > 0)
    time.sleep(0.4)
    assert locked_out.latest() is None


def test_a_relay_speaks_curve_on_both_sides(sync: WeightSync, keys: Path) -> None:
    make_keys(keys, "relay")
    relay = sync.relay(WeightSource(*sync.server.endpoints, client="relay"), LOOPBACK)
    subscriber = sync.follow(relay.endpoints, client_keys(keys))
    stranger = sync.follow(relay.endpoints)
    for number in range(3):
        sync.bring(number, subscriber)
    assert stranger.latest() is None


class Tap:
    """Stands between worker and learner on TCP and keeps all bytes of the first connection."""

    def __init__(self, sync: WeightSync) -> None:
        self.seen = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._stack, self._target = sync.stack, sync.server.endpoints.fetch
        self._stack.callback(self._server.close)
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        here, _ = self._server.accept()
        host, port = self._target.removeprefix("tcp://").split(":")
        there = socket.create_connection((host, int(port)))
        self._stack.callback(there.close)
        for pair in ((here, there), (there, here)):
            threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(65536):
                self.seen.extend(data)
                target.sendall(data)


@pytest.mark.parametrize("encrypted", [False, True])
def test_weights_are_readable_on_the_way_without_keys_alone(
    sync: WeightSync, keys: Path, encrypted: bool
) -> None:
    if not encrypted:
        sync.server = sync.serve(LOOPBACK, keys=None)
    tap = Tap(sync)
    ends = Endpoints(sync.server.endpoints.announce, tap.endpoint)
    # The tap passes one connection on.
    sync.bring(1, sync.follow(ends, client_keys(keys) if encrypted else None, timeout_s=60.0))
    assert len(tap.seen) > sync.version(1).manifest.nbytes
    assert (b"hidden_size" in tap.seen) != encrypted


def test_the_keys_command_makes_keys_or_fails_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_q", "keys", str(tmp_path / "k")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0 and "worker.key_secret" in made.stdout
    assert client_keys(tmp_path / "k").server == server_keys(tmp_path / "k").public
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.count("\n") == 1
