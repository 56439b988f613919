"""Starting and stopping our own Redis."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from helpers.commands import is_alive, wait_until

from areal_q.errors import BufferUnavailable
from areal_q.system.ports import free_ports
from areal_q.system.processes import die_with_parent, module_command
from buffer.redis_store.local_server import RedisServer, main


@pytest.mark.parametrize("left_out", ["--dir", "--socket"])
def test_a_server_without_a_place_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left_out: str
):
    given = {"--dir": "d", "--socket": "s"}
    del given[left_out]
    monkeypatch.setattr(
        sys, "argv", ["local_server", *(word for one in given.items() for word in one)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and left_out in capsys.readouterr().err


def test_the_server_keeps_the_memory_of_large_records(short_dir: Path):
    """By default each record of a megabyte would be some 500 fresh pages of 4 kB, or more."""
    with (
        RedisServer.start(short_dir / "redis", short_dir / "s") as server,
        redis.Redis.from_url(server.url) as client,
    ):

        def faults() -> int:
            stat = Path(f"/proc/{server.process.pid}/stat").read_text()
            return int(stat.rpartition(")")[2].split()[7])

        # A rewrite's fork would share pages, which are then copied; behind a slow fsync the buffer would grow.
        client.config_set("auto-aof-rewrite-percentage", 0)
        client.config_set("appendfsync", "no")
        before = faults()
        for _ in range(100):
            client.set("key", bytes(1 << 20))
        assert faults() - before < 100 * 100


def test_the_server_has_a_unix_socket_and_an_append_only_file(short_dir):
    with RedisServer.start(short_dir / "redis", short_dir / "s") as server:
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            settings = client.config_get("*")
        expected = {
            "port": "0",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "pidfile": "",
            "unixsocketperm": "700",
        }
        assert {name: settings[name] for name in expected} == expected
        assert server.process is not None
        assert server.process.pid not in _pids_that_listen_on_tcp()
    assert server.process.returncode == 0
    assert not (short_dir / "s").exists()


def test_what_was_written_is_there_after_stop_and_start(short_dir):
    for expected in (None, b"1"):
        with (
            RedisServer.start(short_dir / "redis", short_dir / "s") as server,
            redis.Redis.from_url(server.url) as client,
        ):
            assert client.get("key") == expected
            client.set("key", 1)


def test_what_was_answered_survives_kill_9_of_the_server(short_dir):
    server = RedisServer.start(short_dir / "redis", short_dir / "s", appendfsync="always")
    assert server.process is not None
    with redis.Redis.from_url(server.url) as client:
        for i in range(100):
            client.rpush("list", i)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with (
        RedisServer.start(short_dir / "redis", short_dir / "s") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.llen("list") == 100


def test_a_server_that_cannot_start_shows_the_end_of_its_log(short_dir):
    directory = short_dir / "redis"
    (directory / "appendonlydir").mkdir(parents=True)
    for path in (
        directory / "appendonly.aof",
        directory / "appendonlydir" / "appendonly.aof.manifest",
    ):
        path.write_bytes(b"this is no append-only file")
    with pytest.raises(BufferUnavailable, match=r"status 1(.|\n)*([Bb]ad file format|manifest)"):
        RedisServer.start(directory, short_dir / "s")


def test_a_socket_path_too_long_for_the_kernel_is_refused(short_dir):
    with pytest.raises(BufferUnavailable, match="too long"):
        RedisServer.start(short_dir / "redis", short_dir / ("s" * 120))


PASSWORD = 'a "quoted" \\ one # of 32 characters'


def test_a_server_for_other_hosts_asks_for_the_password(short_dir: Path):
    """It stands in no argument, and an answer without it is refused."""
    password = short_dir / "password"
    password.write_text(f"{PASSWORD}\n")
    (port,) = free_ports(1)
    command = module_command("buffer.redis_store.local_server", "--dir", str(short_dir / "redis"))
    env = os.environ | {"REDIS_PASSWORD_FILE": str(password)}
    with subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}"], env=env) as server:
        try:
            with redis.Redis(port=port, password=PASSWORD, socket_timeout=30) as client:
                wait_until(lambda: _answers(client), lambda: "", server)
                assert client.config_get("appendonly") == {"appendonly": "yes"}
                assert client.config_get("dir") == {"dir": str(short_dir / "redis")}
            with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            assert b"quoted" not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        finally:
            server.terminate()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_a_server_for_other_hosts_needs_a_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.delenv("REDIS_PASSWORD_FILE", raising=False)
    arguments = ["local_server", "--dir", str(tmp_path), "--listen", "127.0.0.1:1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "REDIS_PASSWORD_FILE" in capsys.readouterr().err


LAUNCHER = """
import sys, time
from buffer.redis_store.local_server import RedisServer
server = RedisServer.start(sys.argv[1] + "/redis", sys.argv[1] + "/s")
print(server.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_server_ends_when_its_launcher_is_killed(short_dir):
    command = [sys.executable, "-c", LAUNCHER, str(short_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        launcher.kill()
    wait_until(lambda: not is_alive(pid), lambda: f"process {pid} is still there")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_child_lives_while_its_parent_does():
    with subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent()) as child:
        time.sleep(0.1)
        assert child.poll() is None
        child.kill()


def _pids_that_listen_on_tcp() -> set[int]:
    listening = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        listening |= {line.split()[9] for line in lines if line.split()[3] == "0A"}
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            for fd in os.listdir(process / "fd"):
                with suppress(OSError):
                    target = os.readlink(process / "fd" / fd)
                    if target.startswith("socket:[") and target[8:-1] in listening:
                        pids.add(int(process.name))
    return pids
