"""Finds the Redis of a run for the operators' commands, or starts one on the data that the run left."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import redis

from areal_q.config import load
from areal_q.errors import AReaLQError, BufferUnavailable, ConfigError
from areal_q.system.files import alone_in
from areal_q.system.socket_dir import sockets_of
from buffer.redis_store.connection import connect
from buffer.redis_store.keys import Keys
from buffer.redis_store.local_server import RedisServer


@contextmanager
def open_run(
    directory: Path | None, url: str | None, run: str | None
) -> Iterator[tuple[redis.Redis, str]]:
    """Yields a client and the run's name. Raises ConfigError if the arguments name no run, and
    BufferUnavailable if its Redis does not answer."""
    if directory is not None and url is None and run is None:
        name = load(directory / "config.toml").name
        where = _server_of(directory)
    elif directory is None and run is not None and (url or os.environ.get("REDIS_URL")):
        name, where = run, nullcontext(url or os.environ["REDIS_URL"])
    else:
        raise ConfigError("say where: a run's directory, or --redis URL and --run NAME")
    with where as address:
        try:
            with connect(address) as client:
                known = client.exists(*Keys(name).fixed)
                if not known and directory is None:
                    raise ConfigError(f"--run {name}: Redis has nothing of such a run")
                yield client, name
        except (redis.RedisError, ValueError, OSError) as error:
            if isinstance(error, AReaLQError):
                raise
            raise BufferUnavailable(f"redis: {error}") from error


@contextmanager
def _server_of(directory: Path) -> Iterator[str]:
    """Yields the URL of a run's Redis: the one in REDIS_URL, else the launcher's, else one that is started here
    on the data that the run left. Raises ConfigError if there is none."""
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    socket = sockets_of(directory) / "redis"
    if socket.exists():
        yield f"unix://{socket}"
        return
    if not (directory / "redis").is_dir():
        raise ConfigError(f"{directory}: no Redis runs there and none left its data; set REDIS_URL")
    taken = "a run is going on there, and its Redis does not answer"
    with alone_in(directory, taken), tempfile.TemporaryDirectory(prefix="areal-q-buffer-") as made:
        data, sockets = directory / "redis", Path(made)
        if not os.access(
            data, os.W_OK
        ):  # another's run, or a read-only disk: a server wants to write
            data = Path(shutil.copytree(data, sockets / "data"))
        with RedisServer.start(data, sockets / "redis") as server:
            yield server.url
