"""Clients of the endpoint that say nothing, or no UTF-8, take nothing from the others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from areal_q.config import Sampling
from areal_q.tasks import CharTokenizer
from rollout.engines.base import Request
from rollout.openai_server import app, connections
from rollout.openai_server.app import Endpoint

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: "
"""The beginning of headers that never end"""


@asynccontextmanager
async def serving(token: Path | None = None, engine: Any = None) -> AsyncIterator[int]:
    engine, path = engine or Mock(version=3, max_positions=4096), str(token) if token else None
    endpoint = Endpoint(engine, CharTokenizer(), "run", None, Sampling(), "0", path)
    try:
        yield await endpoint.start()
    finally:
        await endpoint.close()


async def ended(reader: asyncio.StreamReader) -> bool:
    """Waits until the other end hangs up."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def status(port: int) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{port}/v1/models") as reply,
    ):
        return reply.status


async def test_connections_that_say_nothing_shut_nobody_out(monkeypatch: pytest.MonkeyPatch):
    """As many as there is room for are held, again and again: who asks is served, and the oldest goes."""
    monkeypatch.setattr(app, "most_connections", lambda: 3)
    async with serving() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for reader, _ in held[:2]:
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(HEAD)
            assert await ended(reader)
        assert await status(port) == 200
        assert await ended(held[2][0])
        for _, writer in held:
            writer.close()


async def test_more_requests_than_there_is_room_for_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "most_connections", lambda: 3)
    async with serving() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in held:
            writer.write(HEAD + b"1\r\nExpect: 100-continue\r\nContent-Length: 100\r\n\r\n")
        for reader, _ in held:
            assert b" 100 " in await reader.readline()
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await ended(reader)
            writer.close()
        held[0][1].transport.abort()
        while True:  # the server may not have seen yet that it has gone
            try:
                assert await status(port) == 200
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.01)
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("sent", [b"", HEAD])
async def test_a_connection_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(connections, "HEAD_S", 0.01)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await ended(reader)
        writer.close()


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "BODY_S", 0.01)
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"1\r\nContent-Length: 100\r\n\r\n{")
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()


class Talker:
    """An engine that says on and on, until its client has gone."""

    version, max_positions = 3, 4096

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def generate(self, request: Request, on_token: Any = None, **_: Any) -> None:
        try:
            while True:
                on_token(0, 5, -0.5)
                await asyncio.sleep(0)
        finally:
            self.gone.set()


async def test_an_answer_that_is_not_read_ends(monkeypatch: pytest.MonkeyPatch):
    """As many of them as there is room for shut nobody out for ever."""
    monkeypatch.setattr(connections, "READ_S", 0.01)
    talker = Talker()
    async with serving(engine=talker) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"prompt": "1+1=", "stream": true, "max_tokens": 1000}'
        head = HEAD + b"1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await talker.gone.wait()
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_only_a_connection_without_a_request_has_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_S", 0.0)
    monkeypatch.setattr(connections, "IDLE_S", 0.0)
    transport, hung_up = Mock(), asyncio.Event()
    transport.abort.side_effect = hung_up.set
    connection = connections.Connections(Mock, 1)()
    connection.connection_made(transport)
    connection.request_begins()
    await asyncio.sleep(0.05)
    assert not hung_up.is_set()
    connection.request_ends()
    await hung_up.wait()


@pytest.mark.parametrize("said", [b"Bearer \xff", b"\xff\xfe", b"Bearer sesam\xc3", b""])
async def test_a_token_that_is_no_text_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: bytes
):
    (tmp_path / "token").write_text("sesame")
    async with serving(token=tmp_path / "token") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        writer.write(head + b"Authorization: " + said + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
    assert caplog.records == []
