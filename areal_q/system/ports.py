"""Free ports, for servers that cannot report the port they bound, and a check that a port is free."""

import random
import socket
from contextlib import ExitStack

from areal_q.errors import ConfigError

CANDIDATES = range(20_000, 32_000)
"""Ports below those that Linux assigns to connections by default (32,768 and up), so that no connection takes
one before the server binds it, even a minute later."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns `count` different ports that are free at `host`. Raises OSError if there are fewer."""
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
    """Raises ConfigError, naming `setting`, if no server can listen at `port` of `host`; "" is loopback."""
    plain = host.strip("[]") or "127.0.0.1"
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    try:
        socket.create_server((plain, port), family=family).close()
    except OSError as error:
        # create_server appends the address to the message, which names it already.
        why, _, _ = str(error.strerror).partition(" (while")
        raise ConfigError(f"{setting}: {plain}:{port}: {why}") from error
