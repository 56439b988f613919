"""Builds the endpoint's answer to one request, with text and token ids, as a whole or in chunks."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_q.tasks import Tokenizer
from rollout.engines.base import Completion
from rollout.engines.stop_conditions import TextStream, cut_at_stop, held_back
from rollout.openai_server.schema import (
    ChatBody,
    CompletionBody,
    Told,
    chat_choice,
    completion_choice,
    usage,
)


class Reply:
    """Builds the answers to one request, whole or in chunks."""

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        model: str,
        tokenizer: Tokenizer,
        hidden: tuple[str, ...],
    ) -> None:
        """Prepares answers to `body`. Their text ends before the first of the stop strings `hidden`."""
        self._chat = isinstance(body, ChatBody)
        self._prompt, self._tokenizer = prompt, tokenizer
        self._logprobs = bool(body.logprobs) or (self._chat is False and body.logprobs == 0)
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._hidden = hidden
        self.counts = body.stream_options is not None and body.stream_options.include_usage
        self._streams: dict[int, TextStream] = {}
        self._text: dict[int, str] = {}
        self._sent: dict[int, int] = {}

    def told(self, completion: Completion, index: int) -> Told:
        ids = completion.response_ids.tolist()
        return Told(
            index=index,
            text=cut_at_stop(self._decode(ids), self._hidden),
            ids=ids,
            pieces=[self._tokenizer.decode([i]) for i in ids],
            logprobs=completion.logprobs.tolist(),
            versions=[s.version for s in completion.spans for _ in range(s.tokens)],
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
        )

    def whole(self, told: list[Told]) -> dict[str, Any]:
        make = chat_choice if self._chat else completion_choice
        choices = [make(t, self._logprobs) for t in told]
        return {
            **self._head,
            "choices": choices,
            "usage": self._usage(told),
            "prompt_token_ids": self._prompt,
        }

    def counted(self, told: list[Told]) -> dict[str, Any]:
        """Returns the last chunk of a stream whose request asked for the number of tokens."""
        return {**self._of_stream(), "choices": [], "usage": self._usage(told)}

    def _usage(self, told: list[Told]) -> dict[str, int]:
        return usage(len(self._prompt), sum(len(t.ids) for t in told))

    def chunk(self, index: int, token: int, logprob: float) -> dict[str, Any] | None:
        """Returns the chunk for one token. Text is kept for a later chunk as long as it ends in the middle of a
        character, or with what may be the beginning of a hidden stop string."""
        stream = self._streams.setdefault(index, TextStream(self._decode))
        text = self._text.get(index, "") + stream.add(token)[0]
        sent = self._sent.get(index, 0)
        seen = cut_at_stop(text, self._hidden)
        waits = held_back(text, self._hidden) if seen == text else 0
        new = seen[sent : len(seen) - waits]
        self._text[index], self._sent[index] = text, sent + len(new)
        one = Told(
            index=index,
            text=new,
            offset=sent,
            ids=[token],
            pieces=[self._tokenizer.decode([token])],
            logprobs=[logprob],
            versions=[],
            finish_reason=None,
        )
        return self._chunk(one)

    def last(self, told: Told) -> dict[str, Any]:
        rest = told.text[self._sent.get(told.index, 0) :]
        return self._chunk(msgspec.structs.replace(told, text=rest, ids=[], pieces=[], logprobs=[]))

    def _chunk(self, told: Told) -> dict[str, Any]:
        make = chat_choice if self._chat else completion_choice
        choice = make(told, self._logprobs)
        if self._chat:
            choice["delta"] = choice.pop("message")
        return {**self._of_stream(), "choices": [choice]}

    def _of_stream(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i not in self._tokenizer.special_ids])
