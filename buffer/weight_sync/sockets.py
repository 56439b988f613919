"""The weight server's endpoints: where to bind or connect, and sockets bound with the limits they need."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from areal_q.errors import ConfigError
from buffer.weight_sync.curve import CLIENT, ClientKeys, ServerKeys, client_keys

MAX_REQUEST_BYTES = 4096
"""A request is about 100 bytes; ZeroMQ hangs up on a peer that sends more than this."""


class Endpoints(NamedTuple):
    """The two ZeroMQ endpoints of a weight server, such as `tcp://learner:5551`."""

    announce: str
    """PUB socket: announcements and deltas for everybody."""
    fetch: str
    """ROUTER socket: answers to each worker's own requests."""


@dataclass(frozen=True)
class WeightSource:
    """The weight server that a worker connects to, as the command line names it.

    None leaves an endpoint to what the learner wrote into Redis, and keys to the settings.
    """

    announce: str | None = None
    fetch: str | None = None
    keys: str | None = None
    """Directory of CURVE keys on this machine."""
    client: str = CLIENT
    """Name of the key in that directory to connect with."""

    def endpoints(self, learner: dict[str, str]) -> tuple[str, str]:
        """Returns (announce, fetch), given the endpoints that the learner wrote into Redis."""
        return self.announce or learner["announce"], self.fetch or learner["fetch"]

    def load_keys(self, configured: str | None) -> ClientKeys | None:
        """Returns the keys to connect with, or None where no directory is named.

        `configured` is the directory that the settings name. Raises ConfigError naming a key that is unusable.
        """
        directory = self.keys or configured
        return client_keys(directory, self.client) if directory else None


def bind(
    context: zmq.Context,
    kind: int,
    endpoint: str,
    *,
    queued: int,
    peer_timeout_s: float,
    keys: ServerKeys | None,
) -> zmq.Socket:
    """Returns a socket of `kind` bound to `endpoint`, which hangs up on peers that misbehave.

    At most `queued` messages wait for one peer; one that does not introduce itself, or answers no heartbeat,
    for `peer_timeout_s` is dropped with its queue. With `keys` only listed clients get in. Raises ConfigError
    if the endpoint cannot be bound.
    """
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, queued)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    sock.setsockopt(zmq.HANDSHAKE_IVL, int(peer_timeout_s * 1000))
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
    """Returns the endpoint of `sock`, with the port that the system chose where `:0` or `:*` was asked for."""
    return sock.getsockopt_string(zmq.LAST_ENDPOINT)


class IpcFiles:
    """The files behind bound `ipc://` endpoints, which ZeroMQ leaves behind."""

    def __init__(self, *endpoints: str) -> None:
        paths = [e.removeprefix("ipc://") for e in endpoints if e.startswith("ipc:///")]
        self._inodes = {path: os.stat(path).st_ino for path in paths}

    def remove(self) -> None:
        """Deletes the files, except those that another server has bound since."""
        for path, inode in self._inodes.items():
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # else a successor has bound the same path
                    os.unlink(path)
