"""The endpoint of a worker (docs/endpoint.md): OpenAI's completions, chats and responses, Anthropic's messages,
models, episodes.

Requests share the engine with the tickets. A request that names no episode leaves nothing behind. One that
does, by the header `X-Episode`, by its URL or by its key, continues the recorded turns: episode_turns.py.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from areal_q.checks.packages import check_endpoint_packages
from areal_q.config import Sampling
from areal_q.errors import ConfigError, EngineDied, RecordError, TaskError
from areal_q.system.ports import most_connections
from areal_q.tasks import Tokenizer, stop_strings
from rollout.engines.base import Completion, Engine, Request, TokenCallback
from rollout.environments.external import Episode, Episodes, Said, Talk
from rollout.openai_server.access import bound_to, denied, episode_key
from rollout.openai_server.connections import Connections
from rollout.openai_server.dialects import messages, responses
from rollout.openai_server.episode_turns import (
    asked_sampling,
    context_of_messages,
    context_of_prompt,
    fixed_sampling,
)
from rollout.openai_server.replies import Reply
from rollout.openai_server.request_fields import B, decoded_request
from rollout.openai_server.schema import (
    BeginEpisode,
    ChatBody,
    CompletionBody,
    RewardBody,
    decoded,
)
from rollout.openai_server.streaming import stream
from rollout.openai_server.token_route import TokenReply, decoded_tokens
from rollout.reply_formats.reader import ReplyReader

logger = logging.getLogger(__name__)
HEADER = "X-Episode"
MAX_BODY_BYTES = 4 << 20
"""Most bytes in a request's body, enough for about 500,000 token ids in JSON"""
SHUTDOWN_S = 1.0
"""Seconds that a request which is being answered has at the end: it may wait for an episode for a minute"""
BODY_S = 60.0
"""Seconds in which a request's body must have come"""


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
        reply_format: str = "auto",
    ) -> None:
        """`reply_format` is `task.chat.reply_format`. Raises ConfigError if `address` is not valid or lies
        beyond loopback without a token, if the token file cannot be read, or if aiohttp is not installed."""
        self.host, self._port, self._token = bound_to(address, token_file)
        check_endpoint_packages()
        from aiohttp import web

        self._web = web
        self._engine, self._tokenizer, self._model = engine, tokenizer, model
        self._episodes, self._sampling = episodes, sampling
        self._reader = ReplyReader(tokenizer, reply_format)
        self._runner: Any = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> int:
        """Starts to listen and returns the port. Raises ConfigError if the address cannot be bound."""
        web = self._web

        @web.middleware
        async def guard(request: Any, handler: Any) -> Any:
            if request.transport is None:  # the client has left
                return await self._guard(request, handler)
            connection = request.transport.get_protocol()
            connection.request_begins()
            try:
                return await self._guard(request, handler)
            finally:
                connection.request_ends()

        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
        self._add_routes(app.router)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        connections = Connections(self._runner.server, most_connections())
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(connections, self.host, self._port)
        except OSError as error:
            await self._runner.cleanup()
            where = f"{self.host}:{self._port}"
            raise ConfigError(f"rollout.serve (--serve): {where}: {error.strerror}") from error
        port = self._listener.sockets[0].getsockname()[1]
        logger.info("OpenAI-compatible endpoint on %s", self.url(port))
        if self._episodes:
            token = self._token.decode() if self._token else ""
            self._episodes.begin_playing(self.url(port), self._model, token)
        return port

    def _add_routes(self, router: Any) -> None:
        router.add_post("/inference/v1/generate", self._generate)
        router.add_post("/v1/episodes/{id}/inference/v1/generate", self._generate)
        # Anthropic's clients append "/v1" to a base URL themselves.
        for base in ("/v1", "/v1/episodes/{id}", "/v1/episodes/{id}/v1"):
            router.add_get(f"{base}/models", self._models)
            router.add_get(f"{base}/models/{{name}}", self._of_name)
            router.add_post(f"{base}/completions", self._completions)
            router.add_post(f"{base}/chat/completions", self._chat)
            router.add_post(f"{base}/responses", self._responses)
            router.add_post(f"{base}/messages", self._messages)
            router.add_post(f"{base}/messages/count_tokens", self._count)
        router.add_post("/v1/episodes", self._begin)
        router.add_post("/v1/episodes/{id}/reward", self._reward)
        router.add_delete("/v1/episodes/{id}", self._drop)

    def url(self, port: int) -> str:
        """Returns the base URL that clients of this `port` are given."""
        host = f"[{self.host}]" if ":" in self.host else self.host  # of IPv6
        return f"http://{host}:{port}/v1"

    async def close(self) -> None:
        if self._episodes:
            await self._episodes.end_playing()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _guard(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """Refuses a request without the token, and answers errors of a request in OpenAI's form."""
        reason = denied(request.headers, self._token)
        if reason is not None and not self._is_player(request):
            return self._refused(*reason)
        try:
            return await handler(request)
        except (RecordError, TaskError) as error:
            more = {name: getattr(error, name, None) for name in ("code", "details")}
            return self._refused(400, "invalid_request_error", str(error), **more)
        except EngineDied as error:
            return self._refused(503, "unavailable", str(error))
        except self._web.HTTPException as error:
            return self._refused(error.status, "invalid_request_error", error.text or error.reason)

    def _is_player(self, request: Any) -> bool:
        """Returns True if the key is the id of an episode that is being played, which none but those who may
        begin episodes can have told, and the request is about that episode."""
        key = episode_key(request.headers)
        if self._token is None or key is None or request.path == "/v1/episodes":
            return False
        playing = self._episodes is not None and self._episodes.plays(key)
        return playing and request.match_info.get("id", key) == key

    async def _models(self, request: Any) -> Any:
        listed = {"object": "list", "data": [self._described()], "version": self._engine.version}
        return self._json(listed)

    async def _of_name(self, request: Any) -> Any:
        self._check_model(request.match_info["name"])
        return self._json(self._described())

    def _described(self) -> dict[str, Any]:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "areal-q"}
        return {**model, "max_model_len": self._engine.max_positions or None}

    async def _completions(self, request: Any) -> Any:
        return await self._complete(request, await self._body(request, CompletionBody))

    async def _generate(self, request: Any) -> Any:
        body = self._of_model(decoded_tokens(await self._read(request)))
        return await self._complete(request, body, TokenReply)

    async def _complete(self, request: Any, body: CompletionBody, kind: type[Reply] = Reply) -> Any:
        episode = self._episode(request)
        if episode is not None:
            prompt = context_of_prompt(self._tokenizer, episode, body.prompt)
        elif isinstance(body.prompt, str):
            prompt = self._tokenizer.encode_prompt(body.prompt)
        else:
            prompt = body.prompt
        said = body.prompt if isinstance(body.prompt, str) else None
        return await self._answer(request, body, prompt, episode, said, kind)

    async def _chat(self, request: Any) -> Any:
        return await self._talk(request, await self._body(request, ChatBody))

    async def _responses(self, request: Any) -> Any:
        body = self._of_model(responses.decoded_chat(await self._read(request)))
        return await self._talk(request, body, responses.ResponsesReply)

    async def _messages(self, request: Any) -> Any:
        body = self._of_model(messages.decoded_chat(await self._read(request)))
        return await self._talk(request, body, messages.MessagesReply)

    async def _count(self, request: Any) -> Any:
        data = await self._read(request)
        body = self._of_model(messages.decoded_chat(data, messages.Counted))
        _, prompt = self._prompt(body, self._episode(request))
        return self._json({"input_tokens": len(prompt)})

    async def _talk(self, request: Any, body: ChatBody, kind: type[Reply] = Reply) -> Any:
        episode = self._episode(request)
        talk, prompt = self._prompt(body, episode)
        return await self._answer(request, body, prompt, episode, talk, kind)

    def _prompt(self, body: ChatBody, episode: Episode | None) -> tuple[Talk, list[int]]:
        """Returns what a chat's request says, and the tokens after which its reply is drawn."""
        said = [m.plain() for m in body.messages]
        talk = Talk(said, [tool.plain() for tool in body.tools or ()])
        variables = body.chat_template_kwargs or {}
        if episode is not None:
            ends = self._reader.ends
            prompt = context_of_messages(self._tokenizer, episode, talk, variables, ends)
        else:
            prompt = self._tokenizer.encode_messages(said, variables, talk.tools)
        if talk.tools and body.tool_choice != "none":
            self._reader.check_calls()
        return talk, prompt

    async def _body(self, request: Any, type: type[B]) -> B:
        """Returns the decoded body. A request need not name a model; raises HTTPNotFound if it names another
        than the run's, and RecordError for a body that is not valid."""
        return self._of_model(decoded_request(await self._read(request), type))

    def _of_model(self, body: B) -> B:
        self._check_model(body.model or self._model)
        return body

    def _check_model(self, name: str) -> None:
        if name != self._model:
            raise self._web.HTTPNotFound(text=f"no model {name!r} here, but {self._model!r}")

    async def _read(self, request: Any) -> bytes:
        """Returns the request's body. Raises HTTPRequestTimeout if it is not there within BODY_S seconds."""
        try:
            async with asyncio.timeout(BODY_S):
                return await request.read()
        except TimeoutError as error:
            raise self._web.HTTPRequestTimeout(text="the body did not come") from error

    def _episode(self, request: Any) -> Episode | None:
        """Returns the episode that the header, the URL or the key names, if any does. Raises RecordError if
        they name several, or one that nobody plays."""
        headers = request.headers
        names = (headers.get(HEADER), request.match_info.get("id"), episode_key(headers))
        named = {name for name in names if name is not None}
        if len(named) > 1:
            raise RecordError("header, URL and key name several episodes")
        return self._required().find(named.pop()) if named else None

    async def _answer(
        self,
        request: Any,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        episode: Episode | None,
        said: Said,
        kind: type[Reply] = Reply,
    ) -> Any:
        if not prompt:
            raise RecordError("the prompt is empty")
        sampling = (
            fixed_sampling(body, episode) if episode else asked_sampling(body, self._sampling)
        )
        stops = frozenset([*self._tokenizer.stops, *(body.stop_token_ids or ())])
        no_text = self._tokenizer.special_ids
        if isinstance(body, ChatBody):
            stops, no_text = stops | self._reader.ends, self._reader.no_text
        # In an episode the agent needs the whole text, its stops included, for its next turn to extend it.
        kept = body.include_stop_str_in_output or episode is not None
        hidden = () if kept else stop_strings(sampling)
        reply = kind(
            body, prompt, self._model, self._tokenizer, hidden, self._reader.format, no_text
        )

        async def generate(on_token: TokenCallback | None) -> list[Completion]:
            if episode is not None:
                turn = self._required().turn
                asked = (episode, said, prompt, stops, body.limit, body.stops, on_token)
                return [await turn(*asked, view=reply.message, id=reply.id)]
            asked = self._request(body, prompt, sampling, stops)
            return await self._engine.generate(asked, on_token)

        if body.stream:
            headers = {"Content-Type": "text/event-stream"}
            response = self._web.StreamResponse(headers=headers)
            await stream(request, response, reply, generate)
            return response
        told = [reply.told(c, i) for i, c in enumerate(await generate(None))]
        return self._json({**reply.whole(told), "sampling": sampling})

    def _request(
        self,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        sampling: Sampling,
        stops: frozenset[int],
    ) -> Request:
        """Returns what the engine is asked for outside of episodes."""
        return Request(
            prompt_ids=np.array(prompt, np.int32),
            num_samples=body.n,
            sampling=sampling,
            seed=body.seed if body.seed is not None else uuid.uuid4().int >> 66,
            stop_ids=stops,
            decode=self._tokenizer.decode,
            masked=getattr(body, "return_sampling_mask", False),
        )

    async def _begin(self, request: Any) -> Any:
        data = await self._read(request)
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
                "purpose": ticket.purpose,
                "source": ticket.source,
                "prompt": ticket.prompt,
                "prompt_token_ids": ticket.prompt_ids.numpy().tolist(),
                "answer": ticket.answer,
                "columns": msgspec.Raw((ticket.columns or "{}").encode()),
                "max_tokens": ticket.sampling.max_tokens,
            }
        )

    async def _reward(self, request: Any) -> Any:
        body = decoded(await self._read(request), RewardBody)
        episodes = self._required()
        episode = episodes.find(request.match_info["id"])
        if body.failed is not None:
            episodes.fail(episode, body.failed, body.why)
        elif body.reward is not None and body.turn is not None:
            episodes.reward_turn(episode, body.turn, body.reward)
        elif body.reward is not None:
            episodes.end(episode, body.reward, body.parts)
        tokens = sum(len(path.ids) for path in episode.response.paths)
        return self._json({"id": episode.id, "tokens": tokens})

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

    def _refused(
        self,
        status: int,
        kind: str,
        message: str,
        code: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> Any:
        # The outer type, and details, are what Anthropic's clients look for.
        error: dict[str, Any] = {"message": message, "type": kind, "code": code}
        error |= {"details": details} if details else {}
        return self._json({"type": "error", "error": error}, status)
