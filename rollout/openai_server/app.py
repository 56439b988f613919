"""The OpenAI-compatible endpoint of a worker (docs/endpoint.md): completions, chat, models, episodes.

Requests share the engine with the tickets. A request that names no episode leaves nothing behind. One that does
(by the header `X-Episode`) must extend the recorded turns token for token, and only what is new is tokenised.
"""

import asyncio
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from areal_q.config import Sampling
from areal_q.errors import ConfigError, EngineDied, RecordError, TaskError
from areal_q.system.local_requests import LOOPBACK, refusal
from areal_q.tasks import Tokenizer
from rollout.engines.base import Completion, Engine, Request, TokenCallback
from rollout.engines.stop_conditions import stop_strings
from rollout.environments.external import Episode, Episodes
from rollout.openai_server.replies import Reply
from rollout.openai_server.schema import (
    BeginEpisode,
    ChatBody,
    CompletionBody,
    RewardBody,
    Told,
    decoded,
)

logger = logging.getLogger(__name__)
HEADER = "X-Episode"
KNOBS = ("temperature", "top_k", "top_p", "min_p")
MAX_BODY_BYTES = 4 << 20
"""Most bytes in a request's body, enough for about 500,000 token ids in JSON"""
B = TypeVar("B", CompletionBody, ChatBody)
Tokens = asyncio.Queue[tuple[int, int, float] | None]


class Endpoint:
    """A server that runs until it is closed. `address` is [HOST:]PORT; the host is loopback unless given, and
    port 0 means any free port."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        episodes: Episodes | None,
        sampling: Sampling,
        address: str,
        token_file: str | None,
    ) -> None:
        """Raises ConfigError if `address` is not valid or lies beyond loopback without a token, if the token
        file cannot be read, or if aiohttp is not installed."""
        self._host, self._port, self._token = bound_to(address, token_file)
        try:
            from aiohttp import web
        except ModuleNotFoundError as error:
            raise ConfigError(
                "rollout.serve (--serve) needs aiohttp: pip install 'areal-q[server]'"
            ) from error
        self._web = web
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._episodes, self._sampling = episodes, sampling
        self._runner: Any = None

    async def start(self) -> int:
        """Starts to listen and returns the port. Raises ConfigError if the address cannot be bound."""
        web = self._web

        @web.middleware
        async def guard(request: Any, handler: Any) -> Any:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/episodes", self._begin)
        app.router.add_post("/v1/episodes/{id}/reward", self._reward)
        app.router.add_delete("/v1/episodes/{id}", self._drop)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self._host}:{self._port}"
            raise ConfigError(f"rollout.serve (--serve): {where}: {error.strerror}") from error
        port = self._runner.addresses[0][1]
        logger.info("OpenAI-compatible endpoint on http://%s:%d/v1", self._host, port)
        return port

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _guard(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Refuses a request without the token, and answers errors of a request in OpenAI's form."""
        if self._token is None:
            if (reason := refusal(request.headers)) is not None:
                return self._refused(403, "permission_error", reason)
        else:
            said = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(said, b"Bearer " + self._token):
                return self._refused(401, "authentication_error", "wrong or missing bearer token")
        try:
            return await handler(request)
        except (RecordError, TaskError, msgspec.DecodeError) as error:
            return self._refused(400, "invalid_request_error", str(error))
        except EngineDied as error:
            return self._refused(503, "unavailable", str(error))
        except self._web.HTTPException as error:
            return self._refused(error.status, "invalid_request_error", error.text or error.reason)

    async def _models(self, request: Any) -> Any:
        data = [{"id": self._model, "object": "model", "created": 0, "owned_by": "areal-q"}]
        return self._json({"object": "list", "data": data, "version": self._engine.version})

    async def _completions(self, request: Any) -> Any:
        body = await self._body(request, CompletionBody)
        episode = self._episode(request)
        given: list[int] = []
        if episode is not None:
            given = self._new_of_prompt(episode, body.prompt)
            prompt = [*episode.ids, *given]
        elif isinstance(body.prompt, str):
            prompt = self._tokenizer.encode_prompt(body.prompt)
        else:
            prompt = body.prompt
        said = body.prompt if isinstance(body.prompt, str) else None

        def record(told: Told) -> None:
            if episode is not None:
                base = self._tokenizer.decode(prompt) if said is None else said
                episode.text = base + told.text

        return await self._answer(request, body, prompt, given, episode, record)

    async def _chat(self, request: Any) -> Any:
        body = await self._body(request, ChatBody)
        episode = self._episode(request)
        given: list[int] = []
        messages = [m.plain() for m in body.messages]
        if episode is not None:
            given = self._new_of_messages(episode, messages)
            prompt = [*episode.ids, *given]
        else:
            prompt = self._tokenizer.encode_messages(messages)

        def record(told: Told) -> None:
            if episode is not None:
                episode.messages = [*messages, {"role": "assistant", "content": told.text}]

        return await self._answer(request, body, prompt, given, episode, record)

    async def _body(self, request: Any, type: type[B]) -> B:
        """Returns the decoded body. A request need not name a model; raises HTTPNotFound if it names another
        than the run's, and DecodeError for a body that is not valid."""
        body = decoded(await request.read(), type)
        if body.model not in ("", self._model):
            raise self._web.HTTPNotFound(text=f"no model {body.model!r} here, but {self._model!r}")
        return body

    def _episode(self, request: Any) -> Episode | None:
        id = request.headers.get(HEADER)
        return None if id is None else self._required().find(id)

    def _new_of_prompt(self, episode: Episode, prompt: str | list[int]) -> list[int]:
        """Returns the tokens of the prompt after those that are recorded. Raises RecordError if the prompt does
        not begin with the recorded tokens or text."""
        known: Any = episode.text if isinstance(prompt, str) else episode.ids
        if prompt[: len(known)] != known:
            raise RecordError("the prompt does not extend what is recorded of the episode")
        new = prompt[len(known) :]
        return self._tokenizer.encode(new) if isinstance(new, str) else list(new)

    def _new_of_messages(self, episode: Episode, messages: list[dict[str, str]]) -> list[int]:
        known = episode.messages or [{"role": "user", "content": episode.ticket.prompt}]
        if messages[: len(known)] != known:
            raise RecordError("the messages do not extend those recorded of the episode")
        new = messages[len(known) :]
        if not episode.messages and not new:
            return []
        ended = bool(episode.response.ids) and episode.response.ids[-1] == self._tokenizer.eos_id
        return self._tokenizer.encode_turn(new, ended)

    async def _answer(
        self,
        request: Any,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        given: list[int],
        episode: Episode | None,
        record: Callable[[Told], None],
    ) -> Any:
        if not prompt:
            raise RecordError("the prompt is empty")
        sampling = self._sampling_of(body, episode)
        stops = frozenset([self._tokenizer.eos_id, *(body.stop_token_ids or ())])
        # In an episode the agent needs the whole text, its stops included, for its next turn must extend it.
        kept = body.include_stop_str_in_output or episode is not None
        hidden = () if kept else stop_strings(sampling)
        reply = Reply(body, prompt, self._model, self._tokenizer, hidden)

        async def generate(on_token: TokenCallback | None) -> list[Completion]:
            if episode is not None:
                turn = self._required().turn
                return [await turn(episode, given, stops, body.limit, body.stops, on_token)]
            asked = Request(
                prompt_ids=np.array(prompt, np.int32),
                num_samples=body.n,
                sampling=sampling,
                seed=body.seed if body.seed is not None else uuid.uuid4().int >> 66,
                stop_ids=stops,
                decode=self._tokenizer.decode,
            )
            return await self._engine.generate(asked, on_token)

        if body.stream:
            return await self._stream(request, reply, generate, record)
        told = [reply.told(c, i) for i, c in enumerate(await generate(None))]
        record(told[0])
        return self._json(reply.whole(told))

    async def _stream(self, request: Any, reply: Reply, generate: Any, record: Any) -> Any:
        """Answers by server-sent events: a chunk for each token, then one with the finish reason and the
        versions."""
        tokens: Tokens = asyncio.Queue()
        task = asyncio.ensure_future(
            generate(lambda index, token, logprob: tokens.put_nowait((index, token, logprob)))
        )
        task.add_done_callback(lambda _: tokens.put_nowait(None))
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:  # the client may disconnect at any moment, also before the first token
            await self._events(request, response, reply, tokens, task, record)
        except ConnectionResetError:  # engines raise EngineDied, so this is the client's end
            logger.debug("a client left its stream")
        finally:
            task.cancel()
        return response

    async def _events(
        self,
        request: Any,
        response: Any,
        reply: Reply,
        tokens: Tokens,
        task: "asyncio.Future[Any]",
        record: Any,
    ) -> None:
        first = await tokens.get()
        if first is None:  # a failure before the first token is answered as an ordinary error
            completions = await task
        await response.prepare(request)
        try:
            item = first
            while item is not None:
                if (chunk := reply.chunk(*item)) is not None:
                    await _event(response, chunk)
                item = await tokens.get()
            completions = await task
        except (RecordError, EngineDied) as error:
            # The status has been sent, so the error is an event.
            await _event(response, {"error": {"message": str(error), "type": "server_error"}})
            return
        told = [reply.told(c, i) for i, c in enumerate(completions)]
        record(told[0])
        for one in told:
            await _event(response, reply.last(one))
        if reply.counts:
            await _event(response, reply.counted(told))
        await response.write(b"data: [DONE]\n\n")

    def _sampling_of(self, body: CompletionBody | ChatBody, episode: Episode | None) -> Sampling:
        """Returns the sampling settings of a request. Those of an episode are fixed by its ticket; raises
        RecordError if the request asks for others."""
        if episode is None:
            asked = {name: getattr(body, name) for name in KNOBS}
            asked |= {"max_tokens": body.limit, "stop": body.stops or None}
            given = {k: v for k, v in asked.items() if v is not None}
            table = {**msgspec.structs.asdict(self._sampling), **given}
            return msgspec.convert(table, Sampling)
        fixed = episode.ticket.sampling
        for name in KNOBS:
            value = getattr(body, name)
            if value is not None and value != getattr(fixed, name):
                raise RecordError(f"{name} = {value}: an episode draws with {getattr(fixed, name)}")
        if body.n != 1:
            raise RecordError("n must be 1 in an episode")
        return fixed

    async def _begin(self, request: Any) -> Any:
        data = await request.read()
        body = decoded(data, BeginEpisode) if data else BeginEpisode()
        episode = await self._required().begin(body.timeout_s)
        if episode is None:
            return self._refused(503, "unavailable", "no ticket came: ask again")
        ticket = episode.ticket
        return self._json(
            {
                "id": episode.id,
                "ticket": ticket.number,
                "index": episode.index,
                "prompt": ticket.prompt,
                "prompt_token_ids": ticket.prompt_ids.numpy().tolist(),
                "answer": ticket.answer,
                "max_tokens": ticket.sampling.max_tokens,
            }
        )

    async def _reward(self, request: Any) -> Any:
        body = decoded(await request.read(), RewardBody)
        episodes = self._required()
        episode = episodes.find(request.match_info["id"])
        if body.failed is not None:
            episodes.fail(episode, body.failed)
        elif body.reward is not None:
            episodes.end(episode, body.reward, body.parts)
        return self._json({"id": episode.id, "tokens": len(episode.response.ids)})

    async def _drop(self, request: Any) -> Any:
        episodes = self._required()
        episodes.drop(episodes.find(request.match_info["id"]))
        return self._json({"dropped": True})

    def _required(self) -> Episodes:
        if self._episodes is None:
            raise RecordError("no episodes here: they need rollout.environment.type = 'external'")
        return self._episodes

    def _json(self, values: Any, status: int = 200) -> Any:
        data = msgspec.json.encode(values)
        return self._web.Response(body=data, status=status, content_type="application/json")

    def _refused(self, status: int, kind: str, message: str) -> Any:
        return self._json({"error": {"message": message, "type": kind, "code": None}}, status)


async def _event(response: Any, value: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(value) + b"\n\n")


def bound_to(address: str, token_file: str | None) -> tuple[str, int, bytes | None]:
    """Returns host, port and token for an address [HOST:]PORT. Raises ConfigError if the address is not valid
    or lies beyond loopback without a token, or if the token file cannot be read."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"rollout.serve (--serve): {address!r} is not [HOST:]PORT")
    token = _token(token_file)
    if token is None and host not in LOOPBACK:
        raise ConfigError(
            f"rollout.serve (--serve): {address} is not loopback: AREAL_Q_SERVE_TOKEN_FILE "
            "(--serve-token) must name a file with a token"
        )
    return host, int(port), token


def _token(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"AREAL_Q_SERVE_TOKEN_FILE (--serve-token): {error.strerror or error} - {path}"
        ) from error
    if not token:
        raise ConfigError(f"AREAL_Q_SERVE_TOKEN_FILE (--serve-token): {path} is empty")
    return token
