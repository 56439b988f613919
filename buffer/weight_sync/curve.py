"""CURVE encryption of the weight sync: listed keys may fetch, and nobody else reads or alters what is sent.

A directory made by `areal-q keys DIR`:

    server.key, server.key_secret       the learner's, and every relay's towards its workers
    worker.key_secret                   a worker's, and a relay's towards the learner; more by --client NAME
    clients/worker.key                  public: whoever is listed here may connect; remove a file to lock out

Secret files have mode 0600. A worker's machine needs server.key and its own NAME.key_secret only.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from areal_q.errors import ConfigError
from buffer.weight_sync.stats import ServerStats

SERVER, CLIENT, CLIENTS = "server", "worker", "clients"
DOMAIN = "areal-q-weights"


@dataclass(frozen=True)
class ClientKeys:
    """The keys that a worker or relay needs to connect."""

    public: bytes
    secret: bytes
    server: bytes
    """The server's public key: nobody else is taken for the learner."""

    def apply(self, sock: zmq.Socket) -> None:
        """Lets `sock` connect with these keys."""
        sock.curve_publickey, sock.curve_secretkey = self.public, self.secret
        sock.curve_serverkey = self.server


@dataclass(frozen=True)
class ServerKeys:
    """The keys that the learner or a relay needs to accept connections."""

    public: bytes
    secret: bytes
    clients: Path

    def apply(self, sock: zmq.Socket) -> None:
        """Lets `sock` accept encrypted connections only."""
        sock.curve_publickey, sock.curve_secretkey = self.public, self.secret
        sock.curve_server = True
        sock.zap_domain = DOMAIN.encode()

    def guard(self, context: zmq.Context, stats: ServerStats) -> ThreadAuthenticator:
        """Starts a thread that admits only listed keys to the sockets of `context`, and returns it; `stop` ends
        it."""
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback(DOMAIN, _AllowList(self.clients, stats))
        return guard


class _AllowList:
    """Decides who may connect; reads the directory anew for each, so that changes count from the next one
    on."""

    def __init__(self, clients: Path, stats: ServerStats) -> None:
        self._clients, self._stats = clients, stats

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether the public key, in Z85 as in key files, is listed. ZeroMQ calls this by its name."""
        listed = any(_public(path) == key for path in self._clients.glob("*.key"))
        self._stats.strangers += not listed
        return listed


def make_keys(directory: Path, client: str = CLIENT) -> list[Path]:
    """Makes a key pair for the server if there is none, and one for `client`. Returns the secret files.

    Raises ConfigError for a client that has one already, or a directory that cannot be written.
    """
    if not client.replace("-", "").replace("_", "").isalnum() or client == SERVER:
        raise ConfigError(f"keys: {client!r} cannot be a client's name")
    made = []
    try:
        (directory / CLIENTS).mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (SERVER, client):
            secret = directory / f"{name}.key_secret"
            if secret.exists():
                if name == client:
                    raise ConfigError(f"keys: {secret} exists already")
                continue
            previous = os.umask(0o077)  # never readable by others, not even while it is written
            try:
                public, _ = create_certificates(str(directory), name)
            finally:
                os.umask(previous)
            os.chmod(public, 0o644)
            if name == client:
                os.rename(public, directory / CLIENTS / f"{name}.key")
            made.append(secret)
    except OSError as error:
        raise ConfigError(f"keys: {error.strerror} - {error.filename}") from error
    return made


def server_keys(directory: str | Path) -> ServerKeys:
    """Reads the server's keys.

    Raises ConfigError naming the file that is missing, readable by others, or no key.
    """
    public, secret = _pair(Path(directory) / f"{SERVER}.key_secret")
    clients = Path(directory) / CLIENTS
    if not clients.is_dir():
        raise ConfigError(f"keys: no directory {clients}")
    return ServerKeys(public, secret, clients)


def client_keys(directory: str | Path, name: str = CLIENT) -> ClientKeys:
    """Reads the keys of client `name`.

    Raises ConfigError naming the file that is missing, readable by others, or no key.
    """
    public, secret = _pair(Path(directory) / f"{name}.key_secret")
    path = Path(directory) / f"{SERVER}.key"
    if (server := _public(path)) is None:
        raise ConfigError(f"keys: {path} is missing or holds no public key")
    return ClientKeys(public, secret, server)


def _pair(path: Path) -> tuple[bytes, bytes]:
    try:
        found = path.stat()
        # Kubernetes mounts a secret as root's, readable by our group; root itself has no reason to
        # share its own.
        mine = 0o740 if found.st_uid == 0 and os.geteuid() != 0 else 0o700
        if found.st_mode & 0o777 & ~mine:
            raise ConfigError(f"keys: {path} can be read by others; chmod 600 it")
        public, secret = load_certificate(path)
    except OSError as error:
        raise ConfigError(f"keys: {error.strerror} - {path}") from error
    except ValueError as error:
        raise ConfigError(f"keys: {path}: {error}") from error
    if secret is None:
        raise ConfigError(f"keys: {path} holds no secret key")
    return public, secret


def _public(path: Path) -> bytes | None:
    try:
        return load_certificate(path)[0]
    except (OSError, ValueError):
        return None
