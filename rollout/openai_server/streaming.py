"""Streams a reply as server-sent events: those of each token, then those with the finish reason and the
versions. One that has a type is named by it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from areal_q.errors import EngineDied, RecordError
from rollout.engines.base import Completion, TokenCallback
from rollout.openai_server.replies import Event, Reply

logger = logging.getLogger(__name__)
Generate = Callable[[TokenCallback | None], Awaitable[list[Completion]]]
Tokens = asyncio.Queue[tuple[int, int, float] | None]


async def stream(request: Any, response: Any, reply: Reply, generate: Generate) -> None:
    """Answers `request` by `response`, a StreamResponse that is not prepared yet. If the client leaves, the
    work of `generate` is cancelled. Raises what `generate` raises before the first token."""
    tokens: Tokens = asyncio.Queue()
    task = asyncio.ensure_future(
        generate(lambda index, token, logprob: tokens.put_nowait((index, token, logprob)))
    )
    task.add_done_callback(lambda _: tokens.put_nowait(None))
    try:  # the client may disconnect at any moment, also before the first token
        first = await tokens.get()
        if first is None:  # a failure before the first token is answered as an ordinary error
            await task
        await response.prepare(request)
        await _events(response, reply, first, tokens, task)
    except ConnectionResetError:  # engines raise EngineDied, so this is the client's end
        logger.debug("a client left its stream")
    finally:
        task.cancel()


async def _events(
    response: Any,
    reply: Reply,
    item: tuple[int, int, float] | None,
    tokens: Tokens,
    task: "asyncio.Future[list[Completion]]",
) -> None:
    await _send(response, reply.begin())
    try:
        while item is not None:
            await _send(response, reply.events(reply.new(*item)))
            item = await tokens.get()
        completions = await task
    except (RecordError, EngineDied) as error:
        # The status has been sent, so the error is an event.
        await _send(response, [reply.failed(str(error))])
        return
    told = [reply.told(c, i) for i, c in enumerate(completions)]
    for one in told:
        await _send(response, reply.events(reply.rest(one)))
    await _send(response, reply.end(told))
    await response.write(reply.done)


async def _send(response: Any, events: list[Event]) -> None:
    for event in events:
        name = b"event: %b\n" % event["type"].encode() if "type" in event else b""
        await response.write(name + b"data: " + msgspec.json.encode(event) + b"\n\n")
