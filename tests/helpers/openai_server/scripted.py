"""An endpoint whose engine draws what a test has written, and the episodes of one ticket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
from helpers.chain_models import byte_tokenizer

from areal_q.config import Chat, External, Sampling, load
from areal_q.messages import Array, Ticket, VersionSpan
from areal_q.tasks import Tokenizer, load_tokenizer
from rollout.engines.base import Completion, Request, ResponseCallback, TokenCallback
from rollout.environments.base import Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.external import Episodes
from rollout.openai_server.app import Endpoint

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Scripted:
    """An engine that draws the next line of its script, and the end; a line is cut where there is no room."""

    version, max_positions = 3, 4096

    def __init__(self, tokenizer: Tokenizer, script: list[str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.drawn: list[tuple[list[int], list[int]]] = []
        """Prompt and reply of each request"""
        self.seeds: list[int] = []
        self.samplings: list[Sampling] = []
        self.routes: np.ndarray | None = None
        """Experts that each completion tells, of the first tokens"""
        self.wait: Callable[[], Awaitable[Any]] | None = None
        """What each request waits for, once it has its line"""

    async def generate(
        self,
        request: Request,
        on_token: TokenCallback | None = None,
        on_response: ResponseCallback | None = None,
    ) -> list[Completion]:
        line = self.script.pop(0)
        self.seeds.append(request.seed)
        self.samplings.append(request.sampling)
        if self.wait:
            await self.wait()
        ids = [*self.tokenizer.encode(line), self.tokenizer.eos_id]
        ids = ids[: request.sampling.max_tokens]
        ended = ids[-1] in request.stop_ids
        self.drawn.append((request.prompt_ids.tolist(), ids))
        completion = Completion(
            response_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            spans=[VersionSpan(3, len(ids), "ab")],
            finish_reason="stop" if ended else "length",
            routes=None
            if self.routes is None
            else self.routes[: len(self.drawn[-1][0]) + len(ids) - 1],
            sampling_mask=[np.array([i, i + 1], np.int32) for i in ids] if request.masked else None,
        )
        for token in ids if on_token else ():
            on_token(0, token, -0.5)  # pyright: ignore[reportOptionalCall]
        if on_response:
            on_response(0, completion)
        return [completion]


class World:
    """An endpoint, its engine, and the episodes of one ticket."""

    def __init__(self, path: Path, make_ticket: Callable[..., Ticket], script: list[str]) -> None:
        byte_tokenizer(template=TEMPLATE).save_pretrained(path)
        self.tokenizer = load_tokenizer(path, Chat())
        self.engine: Any = Scripted(self.tokenizer, script)
        run = load(None, ["learner.microbatch_tokens=5000"])
        self.episodes = Episodes(run, EngineClient(self.engine, self.tokenizer), External())
        prompt = Array.of(self.tokenizer.encode_prompt("what?"), "int32")
        sampling = Sampling(max_tokens=2000)
        self.ticket = make_ticket(
            group_size=2, prompt="what?", prompt_ids=prompt, sampling=sampling
        )
        self.responses = [Response(), Response()]

    @asynccontextmanager
    async def served(
        self, token: str | None = None, reply_format: str = "auto"
    ) -> AsyncIterator[Any]:
        playing = asyncio.create_task(self.episodes(self.ticket, self.responses))
        sampling = self.ticket.sampling
        at = Endpoint(
            self.engine, self.tokenizer, "run", self.episodes, sampling, "0", token, reply_format
        )
        self.url = f"http://127.0.0.1:{await at.start()}/v1"
        try:
            async with openai.AsyncOpenAI(base_url=self.url, api_key="-", max_retries=0) as client:
                yield client.chat.completions.create
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            await at.close()

    async def post(self, path: str, body: Any = None, key: str = "-", status: int = 200) -> Any:
        heads = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=heads) as http,
            http.post(self.url + path, json=body) as reply,
        ):
            assert reply.status == status, await reply.text()
            return await reply.json()
