"""Ports for servers that cannot say which one they bound."""

import random
import socket
from contextlib import ExitStack

CANDIDATES = range(20_000, 32_000)
"""Below those that Linux hands out to connections, 32,768 and up unless told: nobody else is given one before
the server binds it, be that a minute later."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ones, free at `host`. Raises OSError where there are not so many."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(CANDIDATES, len(CANDIDATES)):
            if len(found) == count:
                return found
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                probe.close()
            else:
                found.append(port)
    raise OSError(f"{count} ports are not free at {host}")
