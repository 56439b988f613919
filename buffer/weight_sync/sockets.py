"""Bound ZeroMQ sockets with the limits that every server of weights needs."""

import os
from contextlib import suppress

import zmq

from areal_q.errors import ConfigError
from buffer.weight_sync.curve import ServerKeys

MAX_REQUEST_BYTES = 4096
"""A request is about 100 bytes; ZeroMQ hangs up on a peer that sends more than this."""


def bind(
    context: zmq.Context,
    kind: int,
    endpoint: str,
    *,
    queued: int,
    peer_timeout_s: float,
    keys: ServerKeys | None,
) -> zmq.Socket:
    """Raises ConfigError when the endpoint cannot be bound."""
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, queued)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, int(peer_timeout_s * 250))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(peer_timeout_s * 1000))
    if keys is not None:
        keys.apply(sock)
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot bind {endpoint}: {error}") from error
    return sock


def bound_to(sock: zmq.Socket) -> str:
    """The endpoint, with the port that the system chose where `:0` or `:*` was asked for."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


class IpcFiles:
    """The files behind bound `ipc://` endpoints, which ZeroMQ leaves behind."""

    def __init__(self, *endpoints: str) -> None:
        paths = [e.removeprefix("ipc://") for e in endpoints if e.startswith("ipc:///")]
        self._inodes = {path: os.stat(path).st_ino for path in paths}

    def remove(self) -> None:
        for path, inode in self._inodes.items():
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # else a successor has bound the same path
                    os.unlink(path)
