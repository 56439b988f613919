"""The processes of an environment of the user's own, as the worker sees them.

| wait       | for                          | unblocked by                                                   |
|------------|------------------------------|-----------------------------------------------------------------|
| start      | the first frame              | the file being loaded; its end; _START_S                        |
| episode    | room for one more            | another episode's end                                           |
| ask        | a reply of its process       | the user's code; the process's death; `timeout_s`: it is killed |

`own_child.py` is their other end. All waits are on the event loop; nothing here has a thread.
"""

import asyncio
import itertools
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from areal_q.config import PythonEnvironment
from areal_q.decode_errors import in_words
from areal_q.errors import TaskError
from areal_q.messages import FailureCause
from areal_q.runner.child_processes import THREAD_VARIABLES
from areal_q.system.processes import die_with_parent, supervised_command
from areal_q.tasks.grading.child_process import frame
from areal_q.tasks.grading.reward_process import MAX_FRAME, TIMED_OUT
from rollout.environments.own_child import (
    NUMBER_BYTES,
    EnvironmentReady,
    EnvironmentReply,
    Question,
)

_START_S = 60.0
"""Seconds that the imports of an environment may take, which do not count against its timeout"""
_readiness = msgspec.msgpack.Decoder(EnvironmentReady)
_replies = msgspec.msgpack.Decoder(EnvironmentReply)


class EpisodeFailed(Exception):
    """An episode that ended through no fault of the model."""

    def __init__(self, said: str, cause: FailureCause) -> None:
        super().__init__(said)
        self.cause: FailureCause = cause


class OwnProcesses:
    """The process that has loaded the file, which is started again if it ends, and one for each open
    episode."""

    def __init__(self, cfg: PythonEnvironment) -> None:
        self._cfg = cfg
        self._room = asyncio.Semaphore(cfg.processes)
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._loader: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        """The process, and the socket to it"""

    async def start(self) -> EnvironmentReady:
        """Returns what the user's class is. Raises TaskError for one that cannot be used."""
        ours, theirs = socket.socketpair()
        settings = msgspec.json.encode(self._cfg.settings).decode()
        arguments = (self._cfg.path, settings, str(self._cfg.memory_mib))
        with theirs:
            process = subprocess.Popen(
                supervised_command("rollout.environments.own_child", *arguments),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                # A fork has none of its parent's threads, for which OpenMP would wait without end.
                env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._loader = process, ours
        ours.setblocking(False)
        try:
            async with asyncio.timeout(_START_S):
                size = int.from_bytes(await _received(ours, 4), "little")
                ready = _readiness.decode(await _received(ours, size))
        except (TimeoutError, OSError, EOFError, msgspec.MsgspecError) as error:
            why = in_words(error) or f"it took more than {_START_S:.0f} s"
            ready = EnvironmentReady(error=f"{self._cfg.path}: cannot be started: {why}")
        ours.setblocking(True)
        if ready.error:
            await self.close()
            raise TaskError(ready.error)
        return ready

    @asynccontextmanager
    async def episode(self) -> AsyncIterator["OwnProcess"]:
        """Yields a process for one episode. It is killed if the block raises, else it may run the user's
        `close`. Raises EpisodeFailed if there can be none."""
        async with self._room:
            number = next(self._numbers).to_bytes(NUMBER_BYTES, "little")
            control, (ours, theirs) = await self._running(), socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(control, [number], [theirs.fileno()])
                except OSError as error:
                    ours.close()
                    raise EpisodeFailed(f"its process ended: {in_words(error)}", "killed") from None
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                yield OwnProcess(reader, writer, self._cfg.timeout_s)
            except BaseException:
                with suppress(OSError):  # it has ended, and with it all that it started
                    control.sendall(number)
                raise
            finally:
                writer.close()

    async def _running(self) -> socket.socket:
        """Returns the socket to the process that has loaded the file."""
        async with self._starting:
            if self._loader and self._loader[0].poll() is None:
                return self._loader[1]
            await self.close()
            try:
                await self.start()
            except TaskError as error:
                said = f"its process did not start: {error}"
                raise EpisodeFailed(said, "unavailable") from error
            assert self._loader is not None
            return self._loader[1]

    async def close(self) -> None:
        """Kills all processes, and those that they started, and waits for their ends."""
        if self._loader is None:
            return
        (process, control), self._loader = self._loader, None
        process.terminate()
        await asyncio.to_thread(process.wait)
        control.close()


class OwnProcess:
    """The process of one episode."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
    ) -> None:
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s

    async def ask(self, question: Question) -> EnvironmentReply:
        """Returns the reply. Raises EpisodeFailed if the user's code raises or takes too long, or its process
        ends."""
        try:
            self._writer.write(frame(question))
            async with asyncio.timeout(self._timeout_s):
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                if size > MAX_FRAME:
                    raise EpisodeFailed(f"gave {size} bytes", "exception")
                reply = _replies.decode(await self._reader.readexactly(size))
        except TimeoutError as error:
            raise EpisodeFailed(TIMED_OUT, "timeout") from error
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            why = "" if isinstance(error, EOFError) else f": {in_words(error)}"
            raise EpisodeFailed(f"its process ended{why}", "killed") from error
        if reply.cause is not None:
            raise EpisodeFailed(reply.text, reply.cause)
        return reply


async def _received(control: socket.socket, nbytes: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        part = await loop.sock_recv(control, nbytes - len(received))
        if not part:
            raise EOFError("it ended as it was loaded")
        received += part
    return received
