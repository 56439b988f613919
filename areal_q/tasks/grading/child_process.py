"""What the processes that run a user's own code have in common: their socket, and how an error becomes a cause.
Imports no torch."""

import os
import socket

import msgspec

from areal_q.errors import RewardUnavailable
from areal_q.messages.trajectories import FailureCause
from areal_q.plugins import line_of


def encodable(text: str) -> str:
    """Returns `text` with `?` for each half of a surrogate pair, which no encoding has."""
    return text.encode("utf-8", "replace").decode()


def failure_of(error: BaseException, path: str) -> tuple[str, FailureCause]:
    """Returns what a user's code raised, with their line if `path` names their file, and the cause that it
    is."""
    said = encodable(f"raised {type(error).__name__}: {error}"[:500])
    said += f", in {line_of(error, path)}" if path else ""
    if isinstance(error, RewardUnavailable):
        return said, "unavailable"
    return said, "killed" if isinstance(error, MemoryError) else "exception"


def private_socket() -> socket.socket:
    """Returns the socket that was stdin and stdout. The user's own reads are then empty, and their prints go to
    stderr."""
    parent = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return parent


def frame(message: msgspec.Struct) -> bytes:
    """Returns a message as it goes over the socket: msgpack after its length, in 4 bytes."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data
