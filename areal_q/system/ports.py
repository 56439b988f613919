"""Ports: free ones, for servers that cannot say which one they bound; and whether one is free."""

import random
import socket
from contextlib import ExitStack

from areal_q.errors import ConfigError

CANDIDATES = range(20_000, 32_000)
"""Below those that Linux hands out to connections, 32,768 and up unless told: nobody else is given one before
the server binds it, be that a minute later."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns different ports that are free at `host`. Raises OSError where there are not so many."""
    found: list[int] = []
    with ExitStack() as probes:
        for port in random.sample(CANDIDATES, len(CANDIDATES)):
            if len(found) == count:
                return found
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                probe.close()
            else:
                found.append(port)
    raise OSError(f"{count} ports are not free at {host}")


def check_free(setting: str, host: str, port: int) -> None:
    """Raises ConfigError, naming `setting`, where nothing can listen at `port` of `host`; "" is loopback."""
    plain = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    try:
        socket.create_server((plain, port), family=family).close()
    except OSError as error:
        # create_server adds the address.
        why, _, _ = str(error.strerror).partition(" (while")
        raise ConfigError(f"{setting}: {plain}:{port}: {why}") from error
