"""A server with OpenAI's chat API that answers, or misbehaves, as a test tells it to."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web


def reply(words: Any, tokens: int = 10, finish_reason: str = "stop") -> Any:
    """Returns what OpenAI's API answers."""
    choice = {"message": {"role": "assistant", "content": words}, "finish_reason": finish_reason}
    return web.json_response({"choices": [choice], "usage": {"total_tokens": tokens}})


Doing = web.Response | str | Callable[[str], web.Response]
"""A response; "hang", "hang up" or "endless"; or what answers the text that it is asked"""


class Server:
    """A server that does as it is told, one request after the other, the last for all that follow, and keeps
    what it was asked. It answers when `together` requests are open."""

    def __init__(self, *doings: Doing, together: int = 1) -> None:
        self._doings, self._together = [*doings], asyncio.Barrier(together)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        await self._together.wait()
        doing = self._doings.pop(0) if len(self._doings) > 1 else self._doings[0]
        match doing:
            case "hang":
                await asyncio.sleep(60)
            case "hang up":
                assert request.transport
                request.transport.close()
            case "endless":
                endless = web.StreamResponse()
                await endless.prepare(request)
                for _ in range(64):
                    await endless.write(b" " * (1 << 16))
                return endless
        if callable(doing):
            doing = doing(self.asked[-1]["messages"][0]["content"])
        return web.Response(**_parts(doing))

    async def told(self, use: Callable[[str], Awaitable[Any]]) -> Any:
        """Returns what `use` returns, which gets the server's URL."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            _, port = runner.addresses[0]
            return await use(f"http://127.0.0.1:{port}/v1")
        finally:
            await runner.cleanup()


def _parts(response: web.Response | str) -> dict[str, Any]:
    """Returns the parts of a response, which can be sent once only."""
    if isinstance(response, str):
        return {"status": 500}
    kept = {name: value for name, value in response.headers.items() if name != "Content-Length"}
    return {"status": response.status, "body": response.body, "headers": kept}
