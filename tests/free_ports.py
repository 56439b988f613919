"""Ports for servers that cannot say which one they bound."""

import random
import socket


def free_ports(count: int) -> list[int]:
    """Different ones, from below the range that the kernel hands out to connections: nobody else is given one
    before a server binds it."""
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            candidate = socket.socket()
            held.append(candidate)
            try:
                candidate.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            except OSError:
                held.pop().close()
        return [s.getsockname()[1] for s in held]
    finally:
        for s in held:
            s.close()


def free_port() -> int:
    return free_ports(1)[0]
