"""With keys, only whoever is listed gets weights, and nobody in between can read them. Real sockets."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from helpers.weight_sync import await_version, follow, raw_socket

from areal_q import messages
from areal_q.config import BroadcastConfig
from areal_q.errors import ConfigError
from areal_q.messages import FetchManifest
from areal_q.weights.version import WeightVersion
from buffer.weight_sync import Endpoints, WeightServer, WeightSource, WeightSubscriber
from buffer.weight_sync.commands.relay import Relay
from buffer.weight_sync.curve import ClientKeys, client_keys, make_keys, server_keys

Make = Callable[..., WeightVersion]
LOOPBACK = Endpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def config(keys: Path) -> BroadcastConfig:
    return BroadcastConfig(heartbeat_s=0.05, timeout_s=0.3, keys=str(keys))


@pytest.fixture
def weight_server(keys: Path, stack: ExitStack) -> WeightServer:
    made = WeightServer(*LOOPBACK, config(keys))
    stack.callback(made.close)
    return made


def follow_with(
    endpoints: Endpoints, keys: ClientKeys | None, stack: ExitStack, on: Path
) -> WeightSubscriber:
    return follow(endpoints, stack, config(on), keys=keys, silence_s=0.5)


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


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o400, False), (0o444, False)])
def test_a_secret_in_a_pod_is_read_by_our_group_alone(
    keys: Path, mode: int, accepted: bool
) -> None:
    """As Kubernetes mounts them under an fsGroup: owner root, group ours."""
    mounted = Path(tempfile.mkdtemp()) / "keys"
    shutil.copytree(keys, mounted)
    for path in [mounted.parent, mounted, *mounted.rglob("*")]:
        os.chown(path, 0, 10001)
        os.chmod(path, 0o750 if path.is_dir() else mode)
    code = (
        "import os, sys; from buffer.weight_sync.curve import client_keys;"
        "os.setgroups([]); os.setgid(10001); os.setuid(10001); client_keys(sys.argv[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(mounted)], capture_output=True, text=True
    )
    shutil.rmtree(mounted.parent)
    assert (result.returncode == 0) is accepted, result.stderr


def test_a_listed_worker_follows_over_encrypted_sockets(
    weight_server: WeightServer, keys: Path, stack: ExitStack, make_version: Make
) -> None:
    subscriber = follow_with(weight_server.endpoints, client_keys(keys), stack, keys)
    for number in range(3):
        weight_server.publish(make_version(number))
        assert await_version(subscriber, number).manifest == make_version(number).manifest
    assert (subscriber.stats.fetch.fetches, subscriber.stats.deltas) == (1, 2)
    assert weight_server.stats.strangers == 0


@pytest.mark.parametrize("kind", ["no keys", "unknown key", "server's key guessed wrong"])
def test_an_unlisted_key_gets_no_announcement_and_no_answer(
    kind: str,
    weight_server: WeightServer,
    keys: Path,
    tmp_path: Path,
    stack: ExitStack,
    make_version: Make,
) -> None:
    weight_server.publish(make_version(1))
    make_keys(tmp_path / "other")
    other, mine = client_keys(tmp_path / "other"), client_keys(keys)
    stranger = {
        "no keys": None,
        "unknown key": ClientKeys(other.public, other.secret, mine.server),
        "server's key guessed wrong": ClientKeys(mine.public, mine.secret, other.server),
    }[kind]
    sub = raw_socket(zmq.SUB, weight_server.endpoints.announce, stack, stranger)
    dealer = raw_socket(zmq.DEALER, weight_server.endpoints.fetch, stack, stranger)
    dealer.send(messages.encode(FetchManifest()))
    subscriber = follow_with(weight_server.endpoints, mine, stack, keys)
    await_version(subscriber, 1)
    # Ten heartbeats later a listed worker has long been served.
    assert not sub.poll(300) and not dealer.poll(300)
    assert weight_server.stats.subscribers == 1 and weight_server.stats.refused == 0
    assert (weight_server.stats.strangers > 0) == (kind == "unknown key")


def test_a_worker_with_keys_takes_nothing_from_a_learner_without(
    keys: Path, stack: ExitStack, make_version: Make
) -> None:
    plain = WeightServer(*LOOPBACK, BroadcastConfig(heartbeat_s=0.05))
    stack.callback(plain.close)
    plain.publish(make_version(1))
    subscriber = follow_with(plain.endpoints, client_keys(keys), stack, keys)
    time.sleep(0.5)
    assert subscriber.latest() is None and subscriber.stats.received == 0


def test_a_key_added_or_removed_counts_at_the_next_connection(
    weight_server: WeightServer, keys: Path, stack: ExitStack, make_version: Make
) -> None:
    weight_server.publish(make_version(1))
    make_keys(keys, "late")
    await_version(follow_with(weight_server.endpoints, client_keys(keys, "late"), stack, keys), 1)
    (keys / "clients" / "late.key").unlink()
    locked_out = follow_with(weight_server.endpoints, client_keys(keys, "late"), stack, keys)
    time.sleep(0.4)
    assert locked_out.latest() is None
    assert weight_server.stats.strangers > 0


def test_a_relay_speaks_curve_on_both_sides(
    weight_server: WeightServer, keys: Path, stack: ExitStack, make_version: Make
) -> None:
    make_keys(keys, "relay")
    upstream = WeightSource(*weight_server.endpoints, client="relay")
    relay = Relay(upstream, LOOPBACK, config(keys))
    stack.callback(relay.close)
    subscriber = follow_with(relay.endpoints, client_keys(keys), stack, keys)
    stranger = follow_with(relay.endpoints, None, stack, keys)
    for number in range(3):
        weight_server.publish(make_version(number))
        assert await_version(subscriber, number).manifest == make_version(number).manifest
    assert stranger.latest() is None


def test_nothing_of_the_weights_is_readable_on_the_way(
    weight_server: WeightServer, keys: Path, stack: ExitStack, make_version: Make
) -> None:
    """A tap on TCP between worker and learner: the manifest's words are seen without keys, not with."""
    import socket
    import threading

    def tapped(target: str) -> tuple[str, bytearray]:
        seen = bytearray()
        server = socket.create_server(("127.0.0.1", 0))
        stack.callback(server.close)

        def pump(a: socket.socket, b: socket.socket) -> None:
            with a, b:
                while data := a.recv(65536):
                    seen.extend(data)
                    b.sendall(data)

        def accept() -> None:
            here, _ = server.accept()
            host, port = target.removeprefix("tcp://").split(":")
            there = socket.create_connection((host, int(port)))
            stack.callback(there.close)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=_quiet, args=(pump, *pair), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"tcp://127.0.0.1:{server.getsockname()[1]}", seen

    def _quiet(work: Callable[..., None], *arguments: object) -> None:
        with suppress(OSError):
            work(*arguments)

    plain = WeightServer(*LOOPBACK, BroadcastConfig(heartbeat_s=0.05))
    stack.callback(plain.close)
    for server, own in ((plain, None), (weight_server, client_keys(keys))):
        server.publish(make_version(1))
        fetch, seen = tapped(server.endpoints.fetch)
        await_version(follow_with(Endpoints(server.endpoints.announce, fetch), own, stack, keys), 1)
        assert len(seen) > make_version(1).manifest.nbytes
        assert (b"hidden_size" in seen) == (own is None)


def test_the_keys_command_makes_keys_or_fails_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_q", "keys", str(tmp_path / "k")]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0 and "worker.key_secret" in made.stdout
    assert client_keys(tmp_path / "k").server == server_keys(tmp_path / "k").public
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and again.stderr.count("\n") == 1
