"""Builds the endpoint's answer to one request, with text and token ids, as a whole or in chunks."""

import secrets
import string
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import msgspec

from areal_q.tasks import Tokenizer
from areal_q.tasks.base import Message
from rollout.engines.base import Completion
from rollout.engines.stop_conditions import TextStream, cut_at_stop, held_back
from rollout.openai_server.schema import (
    ChatBody,
    CompletionBody,
    Told,
    ToolCall,
    chat_choice,
    completion_choice,
    usage,
)
from rollout.openai_server.schema import Message as SentMessage
from rollout.reply_formats.base import Parser, ReplyPart, ReplyRequest, joined
from rollout.reply_formats.reader import PROMPT_TAIL
from rollout.reply_formats.table import ReplyFormat

_SIGNS = string.ascii_letters + string.digits
Event = dict[str, Any]
"""What one server-sent event holds, as JSON"""


class Reply:
    """Builds the answer to one request, whole or as events of a stream, as OpenAI's completions and chats have
    it. Other dialects override what writes it (rollout/openai_server/dialects/)."""

    done = b"data: [DONE]\n\n"
    """What ends a stream"""

    def __init__(
        self,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        model: str,
        tokenizer: Tokenizer,
        hidden: tuple[str, ...],
        format: ReplyFormat,
        no_text: Set[int],
    ) -> None:
        """Prepares answers to `body`. Their text ends before the first of the stop strings `hidden` and leaves
        out the tokens `no_text`; those of a chat are read by `format`."""
        self._chat = isinstance(body, ChatBody)
        self._format, self._no_text = format, no_text
        called = isinstance(body, ChatBody) and body.tool_choice != "none" and body.tools
        tools = [tool.plain() for tool in called or ()]
        tail = prompt[-PROMPT_TAIL:] if self._chat else []
        self._asked = ReplyRequest(tools, tokenizer.decode(tail))
        self._parsers: dict[int, Parser] = {}
        self._calls: dict[int, int] = {}
        self._prompt, self._tokenizer = prompt, tokenizer
        self._logprobs = bool(body.logprobs) or (self._chat is False and body.logprobs == 0)
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._keys = defaultdict[int, str](_new_key)
        self._hidden, self._stop_strings = hidden, body.stops
        self._counts = bool(body.stream_options and body.stream_options.include_usage)
        self._streams: dict[int, TextStream] = {}
        self._text: dict[int, str] = {}
        self._sent: dict[int, int] = {}
        self._begun: set[int] = set()
        """Choices of which an event has told something"""

    @property
    def id(self) -> str:
        """The reply's id, as the client receives it"""
        return self._head["id"]

    def told(self, completion: Completion, index: int) -> Told:
        ids = completion.response_ids.tolist()
        text = cut_at_stop(self._decode(ids), self._hidden)
        parts = self._parts(self._format.parser(self._asked), text, True)
        called = any(part.kind == "call" for part in parts)
        stopped = "tool_calls" if called else "stop"
        return Told(
            index=index,
            text=text,
            parts=parts,
            key=self._keys[index],
            ids=ids,
            pieces=[self._tokenizer.decode([i]) for i in ids],
            logprobs=completion.logprobs.tolist(),
            versions=[s.version for s in completion.spans for _ in range(s.tokens)],
            finish_reason=stopped if completion.finish_reason == "stop" else "length",
            routes=completion.routes,
            sampling_mask=completion.sampling_mask,
        )

    def message(self, completion: Completion) -> Message:
        """Returns the first choice as a message of a conversation, as a chat template takes it."""
        told = self.told(completion, 0)
        calls = [msgspec.convert(call, ToolCall) for call in told.tool_calls()]
        thought = told.said("reasoning")
        return SentMessage(
            "assistant", told.said("content"), tool_calls=calls, reasoning_content=thought
        ).plain()

    def _parts(self, parser: Parser, text: str, ended: bool) -> list[ReplyPart]:
        """Returns the parts of a chat that are certain after `text`."""
        if not self._chat:
            return []
        return joined([*parser.feed(text), *(parser.end() if ended else ())])

    def whole(self, told: list[Told]) -> dict[str, Any]:
        make = chat_choice if self._chat else completion_choice
        choices = [make(t, self._logprobs) for t in told]
        return {
            **self._head,
            "choices": choices,
            "usage": self._usage(told),
            "prompt_token_ids": self._prompt,
        }

    def begin(self) -> list[Event]:
        """Returns the events that come before the first token."""
        return []

    def events(self, told: Told) -> list[Event]:
        """Returns the events of what is new of a choice. Its role is in the first alone, since clients add up
        the texts of a choice's events; so is the prompt in the first of all."""
        head = self._head if self._begun else {**self._head, "prompt_token_ids": self._prompt}
        begun = told.index in self._begun
        self._begun.add(told.index)
        if not self._chat:
            return [{**head, "choices": [completion_choice(told, self._logprobs)]}]
        choice = chat_choice(told, self._logprobs)
        delta = choice["delta"] = choice.pop("message")
        if begun:
            del delta["role"]
        delta["content"] = delta["content"] or ""
        if found := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(found, told.calls)]
        return [{**head, "object": "chat.completion.chunk", "choices": [choice]}]

    def end(self, told: list[Told]) -> list[Event]:
        """Returns the events that come last, after those of all choices."""
        if not self._counts:
            return []
        (chunk,) = self.events(told[0])
        return [{**chunk, "choices": [], "usage": self._usage(told)}]

    def failed(self, why: str) -> Event:
        """Returns the event of an error after the first token."""
        return {"error": {"message": why, "type": "server_error"}}

    def _usage(self, told: list[Told]) -> dict[str, int]:
        return usage(len(self._prompt), sum(len(t.ids) for t in told))

    def new(self, index: int, token: int, logprob: float) -> Told:
        """Returns what one token adds. Text is kept for later as long as it ends in the middle of a character,
        or with what may be the beginning of a hidden stop string."""
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
        return self._parsed(one, False)

    def rest(self, told: Told) -> Told:
        """Returns what is left of a choice after its last token."""
        rest = told.text[self._sent.get(told.index, 0) :]
        new = msgspec.structs.replace(told, text=rest, ids=[], pieces=[], logprobs=[])
        return self._parsed(new, True)

    def _parsed(self, told: Told, ended: bool) -> Told:
        if not self._chat:
            return told
        index, calls = told.index, self._calls.get(told.index, 0)
        if index not in self._parsers:
            self._parsers[index] = self._format.parser(self._asked)
        parts = self._parts(self._parsers[index], told.text, ended)
        self._calls[index] = calls + sum(part.kind == "call" for part in parts)
        key = self._keys[index]
        return msgspec.structs.replace(told, parts=parts, key=key, calls=calls)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in ids if i not in self._no_text])


def _new_key() -> str:
    """Returns the beginning of a choice's ids of calls: hardly ever one of an earlier reply's."""
    return "".join(secrets.choice(_SIGNS) for _ in range(6))
