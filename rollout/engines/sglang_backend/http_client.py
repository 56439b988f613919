"""The HTTP interface of an SGLang server, as far as the adapter uses it."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from areal_q.decode_errors import in_words
from areal_q.errors import ConfigError, EngineDied, RecordError
from areal_q.system.credentials import shown

MAX_LINE_BYTES = 64 << 20
"""Longest line of a stream; lines are long if the server repeats a response from its start with every token."""
_POLL_S = 0.1


class _Finish(Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None


class Span(Struct, frozen=True):
    version: str
    start: int
    end: int


class Meta(Struct, frozen=True):
    completion_tokens: int
    finish_reason: _Finish | None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_token_sampling_logprobs: list[float] = []
    output_token_sampling_mask: list[list[int]] = []
    weight_versions: list[Span] = []
    routed_experts: str | None = None
    """int32 [tokens of prompt and response but the last, layers, experts a token] in base64, with the last
    chunk"""


class Refusal(Struct, frozen=True):
    message: str
    code: int = 400


class Chunk(Struct, frozen=True):
    output_ids: list[int] = []
    """The new token ids, or all ids so far, as the server is configured"""
    meta_info: Meta | None = None
    error: Refusal | None = None


CHUNKS = msgspec.json.Decoder(Chunk)


class SglangClient:
    """A client of one SGLang server. Every method raises EngineDied if the server does not answer or the answer
    is not valid, and ConfigError if the server refuses the key.

    `reuse` keeps connections open. It is only for a server that never closes one first, since a request sent on
    a connection that is being closed would look like a server that died.
    """

    def __init__(self, url: str, key: str | None, timeout_s: float, *, reuse: bool = False) -> None:
        import aiohttp

        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._error = aiohttp.ClientError
        self._no_timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            read_bufsize=MAX_LINE_BYTES,
        )

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Returns the decoded JSON of the answer, or its text if it is not JSON."""
        return await self._call("POST", path, {} if body is None else body, timeout_s)

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        return await self._call("GET", path, None, timeout_s)

    async def up(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the server answers, and returns its /server_info."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self.get("/server_info", min(timeout_s, self.timeout_s))
            except EngineDied:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(_POLL_S)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of a response as they arrive. Raises RecordError if the server refuses the
        request."""
        self._check_open()
        try:
            async with self._session.post(
                f"{self.url}/generate", json=body | {"stream": True}, timeout=self._no_timeout
            ) as answer:
                if answer.status >= 400:
                    self._refuse(answer.status, await answer.text())
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        chunk = CHUNKS.decode(line[6:])
                        if chunk.error is not None:
                            self._refuse(chunk.error.code, chunk.error.message)
                        yield chunk
        except (self._error, TimeoutError, msgspec.DecodeError, ValueError) as error:
            if isinstance(error, RecordError):
                raise
            raise EngineDied(f"SGLang: {in_words(error) or type(error).__name__}") from error

    async def close(self) -> None:
        await self._session.close()

    def _check_open(self) -> None:
        if self._session.closed:
            raise EngineDied("SGLang: the connection was given up")

    def _refuse(self, status: int, said: str) -> None:
        """Raises RecordError if the request is at fault, ConfigError if the key is, otherwise EngineDied."""
        if status in (401, 403):
            raise ConfigError(f"SGLang at {shown(self.url)} asks for another key")
        if status < 500:
            raise RecordError(f"SGLang refuses the request: {said}")
        raise EngineDied(f"SGLang: status {status}: {said}")

    async def _call(
        self, method: Literal["GET", "POST"], path: str, body: Any, timeout_s: float | None
    ) -> Any:
        self._check_open()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, self.url + path, json=body) as answer:
                    text = await answer.text()
        except TimeoutError as error:
            raise EngineDied(f"SGLang did not answer {path} in {timeout_s:.0f} s") from error
        except self._error as error:
            raise EngineDied(f"SGLang, {path}: {error}") from error
        if answer.status in (401, 403):
            raise ConfigError(f"SGLang at {shown(self.url)} asks for another key")
        if answer.status >= 400:
            raise EngineDied(f"SGLang, {path}: status {answer.status}: {text}")
        return json.loads(text) if answer.content_type == "application/json" else text
