"""Replies whose calls have no tags of their own: Llama's JSON, and gpt-oss's channels."""

import json
import re

from rollout.engines.stop_conditions import held_back
from rollout.reply_formats.base import ReplyPart, ReplyRequest, call, call_of_json

_PYTHON = "<|python_tag|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_MAY_BE_TO = re.compile(r"\s*(t|to|to=\S*)?\s*")


class Untagged:
    """A Parser of replies without thoughts and calls."""

    def __init__(self, asked: ReplyRequest) -> None:
        pass

    def feed(self, text: str) -> list[ReplyPart]:
        return [ReplyPart("content", text)] if text else []

    def end(self) -> list[ReplyPart]:
        return []


class LlamaJson:
    """A Parser of replies that are nothing but calls, `{"name": "f", "parameters": {"n": 1}}`, with `;` between
    them, or else content."""

    def __init__(self, asked: ReplyRequest) -> None:
        self._rest, self._held = "", bool(asked.tools)

    def feed(self, text: str) -> list[ReplyPart]:
        self._rest += text
        bare = self._rest.lstrip()
        self._held &= bare.startswith(("{", _PYTHON)) or _PYTHON.startswith(bare)
        return [] if self._held else self._content()

    def end(self) -> list[ReplyPart]:
        return (self._calls() if self._held else None) or self._content()

    def _content(self) -> list[ReplyPart]:
        rest, self._rest = self._rest, ""
        return [ReplyPart("content", rest)] if rest else []

    def _calls(self) -> list[ReplyPart] | None:
        """Returns the calls that the reply consists of; None if it does not."""
        text, out = self._rest.strip().removeprefix(_PYTHON), []
        while text := text.strip(" \n\t;"):
            try:
                end = json.JSONDecoder().raw_decode(text)[1]
            except (ValueError, RecursionError):
                return None
            out.append(call_of_json(text[:end]))
            text = text[end:]
        return out if all(out) else None


class Harmony:
    """A Parser of gpt-oss's messages: `<|channel|>analysis<|message|>…<|end|>` is a thought, the channel
    `final` content, and `<|channel|>commentary to=functions.f<|message|>{"n": 1}<|call|>` a call. Its recipient
    may stand before the channel, too: the prompt has begun the header of a reply's first message."""

    def __init__(self, asked: ReplyRequest) -> None:
        self._tools, self._rest = bool(asked.tools), ""
        self._unsaid = True
        """True until a text is certain"""
        self._head: str | None = ""
        """The header of the message whose text comes; "" before the first, None inside a header"""

    def feed(self, text: str) -> list[ReplyPart]:
        self._rest += text
        out: list[ReplyPart] = []
        while self._header_ends() if self._head is None else self._message_ends(out):
            pass
        return out

    def end(self) -> list[ReplyPart]:
        if self._head is None or not self._rest:
            return []
        kind = "reasoning" if self._is_thought else "content"
        return [ReplyPart(kind, self._rest)]

    def _header_ends(self) -> bool:
        head, found, after = self._rest.partition("<|message|>")
        if found:
            self._head, self._rest = head, after
        return bool(found)

    def _message_ends(self, out: list[ReplyPart]) -> bool:
        """Takes what is certain of a message; returns True if it has ended."""
        ends = _ENDS if self._head else (*_ENDS, "<|channel|>")
        places = [(place, end) for end in ends if (place := self._rest.find(end)) >= 0]
        if places:
            place, end = min(places)
            said, self._rest = self._rest[:place], self._rest[place + len(end) :]
            if (
                end == "<|channel|>"
            ):  # begins the header of the first; the others' begin with "<|start|>"
                to = said if self._unsaid and _TO.fullmatch(said.strip()) else ""
                said, self._rest = said.removeprefix(to), to + end + self._rest
            out += self._parts(said)
            self._head = None
        elif self._function is None:
            certain = self._rest[: len(self._rest) - held_back(self._rest, ends)]
            if not (self._unsaid and _MAY_BE_TO.fullmatch(certain)):
                out += self._parts(certain)
                self._rest = self._rest[len(certain) :]
        return bool(places)

    def _parts(self, said: str) -> list[ReplyPart]:
        if not said:
            return []
        self._unsaid = False
        if self._function is not None:
            return [call(self._function, said) or ReplyPart("content", said)]
        return [ReplyPart("reasoning" if self._is_thought else "content", said)]

    @property
    def _is_thought(self) -> bool:
        return "<|channel|>analysis" in (self._head or "") and self._function is None

    @property
    def _function(self) -> str | None:
        """Name of the function that the message calls; None if it calls none"""
        found = _TO.search(self._head or "") if self._tools else None
        return found[1] if found else None
