"""The weight server's endpoints: where to connect, and its sockets, bound with the limits they need."""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from areal_q.errors import ConfigError
from areal_q.system.ports import most_connections
from buffer.weight_sync.connections import ConnectionBound
from buffer.weight_sync.curve import CLIENT, ClientKeys, client_keys, server_keys
from buffer.weight_sync.stats import ServerStats

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


class ServerSockets:
    """The two sockets of a weight server: `xpub` for what all are told, `router` for what each asks.

    At most `queued` messages wait for one peer of either; one that does not introduce itself, or answers no
    heartbeat, for `peer_timeout_s` is dropped with its queue. With `keys`, a directory, only listed clients get
    in.
    """

    def __init__(
        self,
        listen: Endpoints,
        keys: str | None,
        stats: ServerStats,
        queued: tuple[int, int],
        peer_timeout_s: float,
    ) -> None:
        """Binds both. Raises ConfigError if an endpoint cannot be bound or a key cannot be used."""
        self._keys = server_keys(keys) if keys else None
        self._context = zmq.Context()
        self._guard = self._keys.guard(self._context, stats) if self._keys else None
        self._inodes: dict[str, int] = {}
        """The files behind `ipc://` endpoints, which ZeroMQ leaves behind"""
        try:
            self.xpub = self._bind(zmq.XPUB, listen.announce, queued[0], peer_timeout_s)
            self.router = self._bind(zmq.ROUTER, listen.fetch, queued[1], peer_timeout_s)
        except ConfigError:
            self.close()
            raise
        self.xpub.setsockopt(zmq.XPUB_VERBOSER, 1)
        both = self.xpub, self.router
        # With the port that the system chose where `:0` or `:*` was asked for.
        self.endpoints = Endpoints(*(s.getsockopt_string(zmq.LAST_ENDPOINT) for s in both))
        self.bounds = [
            ConnectionBound(sock, endpoint, most_connections())
            for sock, endpoint in zip(both, self.endpoints, strict=True)
            if endpoint.startswith("tcp://")
        ]
        paths = [e.removeprefix("ipc://") for e in self.endpoints if e.startswith("ipc:///")]
        self._inodes = {path: os.stat(path).st_ino for path in paths}

    def _bind(self, kind: int, endpoint: str, queued: int, peer_timeout_s: float) -> zmq.Socket:
        sock = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDHWM, queued)
        sock.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        sock.setsockopt(zmq.HANDSHAKE_IVL, int(peer_timeout_s * 1000))
        sock.setsockopt(zmq.HEARTBEAT_IVL, int(peer_timeout_s * 250))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(peer_timeout_s * 1000))
        if self._keys is not None:
            self._keys.apply(sock)
        try:
            sock.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot bind {endpoint}: {error}") from error
        return sock

    def close(self) -> None:
        """Closes both and removes the files behind them, except those that another server has bound since."""
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
        for path, inode in self._inodes.items():
            with suppress(FileNotFoundError):
                if os.stat(path).st_ino == inode:  # else a successor has bound the same path
                    os.unlink(path)
