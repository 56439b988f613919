"""Generation from Python: by an engine in this process, or by the endpoint of a worker."""

import json
import operator
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_q.config import Run, Sampling, TorchEngine
from areal_q.config.load import Override
from areal_q.config.run import LARGEST_MASK
from areal_q.decode_errors import fitted
from areal_q.errors import ConfigError, EngineDied, installing
from areal_q.models import Decoder
from areal_q.tasks import Tokenizer, build_tokenizer, without_end
from rollout import engines
from rollout.engines.base import Completion, Engine, Request
from rollout.evaluation.generate import as_published, load_model
from rollout.evaluation.questions import settings_of

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A text, a conversation, or token ids"""


def sampling_of(run: Run, given: Mapping[str, Any]) -> Sampling:
    """Returns the settings of the run with those that are given. Raises ConfigError for what does not fit."""
    table = msgspec.to_builtins(run.rollout.sampling) | dict(given)
    return fitted(table, Sampling, ConfigError, "sampling: ")


def _parted(
    prompt: Sequence[Mapping[str, Any]] | Sequence[int],
) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns messages, or ids of any kind of whole number."""
    messages = [dict(one) for one in prompt if isinstance(one, Mapping)]
    return messages, [operator.index(one) for one in prompt if not isinstance(one, Mapping)]


class Local:
    """An engine in this process, with the weights of a run or of a model."""

    def __init__(self, source: Path, settings: list[Override]) -> None:
        """Raises UserError for a directory that holds neither."""
        self._at_run = any((d / "config.toml").is_file() for d in (source, source.parent))
        task = None if self._at_run else "arithmetic"
        self.run, self._path = settings_of(source, task, None, settings)
        self.tokenizer: Tokenizer = build_tokenizer(self.run.model, self.run.task)
        config = self.run.rollout.engine
        engine = config if isinstance(config, TorchEngine) else TorchEngine()
        self._engine: Engine = engines.build_engine(engine)

    async def start(self) -> None:
        await self._engine.start()
        await self.load(load_model(self.run.model, self._path).requires_grad_(False), 0)

    async def load(self, model: Decoder, version: int) -> None:
        """Generates with these weights from the next token on, in the format of the settings."""
        prompts = [self.tokenizer.encode("0")]
        await self._engine.load_weights(as_published(model, self.run, prompts, version))

    async def close(self) -> None:
        await self._engine.close()

    async def complete(
        self, prompt: Prompt, n: int, seed: int | None, given: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the fields of each completion."""
        ids, stops = self._encoded(prompt)
        sampling = sampling_of(self.run, given)
        asked = Request(
            prompt_ids=np.array(ids, np.int32),
            num_samples=n,
            sampling=sampling,
            seed=uuid.uuid4().int >> 66 if seed is None else seed,
            stop_ids=frozenset(stops),
            decode=self.tokenizer.decode,
            masked=bool(sampling.temperature) and 0 < sampling.top_k <= LARGEST_MASK,
        )
        found = await self._engine.generate(asked)
        return [{**self._told(ids, done), "sampling": sampling} for done in found]

    def _encoded(self, prompt: Prompt) -> tuple[list[int], Collection[int]]:
        """Returns the ids of a prompt, and those that end a response to it."""
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt), self.tokenizer.stops
        messages, ids = _parted(prompt)
        if not messages:
            return ids, self.tokenizer.stops
        return self._chat.encode_messages(messages), self._chat.stops

    @cached_property
    def _chat(self) -> Tokenizer:
        """The tokenizer of conversations: a run's own, and a model's with its chat template."""
        run = self.run
        if self._at_run:
            return self.tokenizer
        task = msgspec.structs.replace(run.task, template="chat")
        return build_tokenizer(run.model, task)

    def _told(self, prompt: list[int], done: Completion) -> dict[str, Any]:
        ids = done.response_ids.tolist()
        return {
            "prompt_ids": prompt,
            "sampling_mask": done.sampling_mask or (),
            "ids": ids,
            "logprobs": done.logprobs.tolist(),
            "versions": [s.version for s in done.spans for _ in range(s.tokens)],
            "text": self.tokenizer.decode(without_end(ids, self.tokenizer.stops)),
            "finish_reason": done.finish_reason,
        }


class Remote:
    """The endpoint of a worker (docs/endpoint.md), such as http://127.0.0.1:8000/v1."""

    def __init__(self, url: str, token: str | None) -> None:
        """Raises ConfigError if aiohttp is not installed."""
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise ConfigError(f"{url}: this needs {installing('server')}") from error
        self._aiohttp: Any = aiohttp
        self._url, self._session = url.rstrip("/"), None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def start(self) -> None:
        self._session: Any = self._aiohttp.ClientSession(headers=self._headers)

    async def load(self, model: Decoder, version: int) -> None:
        raise ConfigError(f"{self._url}: a worker takes its weights from its learner alone")

    async def close(self) -> None:
        await self._session.close()

    async def complete(
        self, prompt: Prompt, n: int, seed: int | None, given: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the fields of each completion. Raises ConfigError for what the endpoint refuses, and
        EngineDied if it does not answer."""
        talk, ids = ([], prompt) if isinstance(prompt, str) else _parted(prompt)
        body = {**given, "n": n, "logprobs": True if talk else 1}
        body |= {"messages": talk} if talk else {"prompt": ids}
        body |= {} if seed is None else {"seed": seed}
        at = f"{self._url}/{'chat/' if talk else ''}completions"
        try:
            async with self._session.post(at, data=json.dumps(body), headers=_JSON) as reply:
                answer: Any = json.loads(await reply.read())
        except (self._aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineDied(f"{at}: no answer: {error}") from error
        if reply.status != 200:
            raise ConfigError(f"{at}: {answer['error']['message']}")
        sampling = fitted(answer["sampling"], Sampling, EngineDied, f"{at}: sampling: ")
        prompt_ids = answer["prompt_token_ids"]
        return [{**_told(prompt_ids, one), "sampling": sampling} for one in answer["choices"]]


_JSON = {"Content-Type": "application/json"}


def _told(prompt: list[int], choice: dict[str, Any]) -> dict[str, Any]:
    found = choice["logprobs"]
    logprobs = found.get("token_logprobs") or [one["logprob"] for one in found["content"]]
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return {
        "prompt_ids": prompt,
        "ids": choice["token_ids"],
        "logprobs": logprobs,
        "versions": choice["versions"],
        "text": text,
        "finish_reason": "length" if choice["finish_reason"] == "length" else "stop",
    }
