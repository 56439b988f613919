"""Free ports, for servers that cannot report the port they bound, a check that a port is free, and how many
connections a server may have."""

import random
import resource
import socket
from contextlib import ExitStack, suppress

from areal_q.errors import ConfigError

CANDIDATES = range(20_000, 32_000)
"""Ports below those that Linux assigns to connections by default (32,768 and up), so that no connection takes
one before the server binds it, even a minute later."""
_SERVERS = 3
"""The most TCP ports at which one process listens: a learner's are for announcements, weights and metrics."""
_MOST = 16_384


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


def allow_open_files() -> None:
    """Raises this process's own limit of open files to the highest that the system lets it have. A login
    shell's is often 1,024, which some hundred workers exhaust."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a limit that they refuse
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections(open_files: int | None = None) -> int:
    """Returns how many connections one server of a process may hold that may have `open_files` files open, by
    default this one: so many that all its servers leave a share for the process's own files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if open_files is None else open_files
    return _MOST if limit == resource.RLIM_INFINITY else min(_MOST, limit // (_SERVERS + 1))
