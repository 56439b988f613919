"""Replies with tags around thoughts and calls: Hermes', Qwen's, GLM's and Mistral's."""

import re
from collections.abc import Callable

import msgspec

from rollout.engines.stop_conditions import held_back
from rollout.reply_formats.base import (
    ReplyPart,
    ReplyRequest,
    call,
    call_of_json,
    call_of_texts,
)

ReadCalls = Callable[[str, ReplyRequest], list[ReplyPart | None]]
"""Function from the text between a call's tags to the calls in it, None for one that cannot be read"""
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*)</function>\s*", re.S)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.S)
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.S)


class Tagged:
    """A Parser of thoughts and calls between tags. Blank space beside a tag is the template's."""

    def __init__(
        self,
        asked: ReplyRequest,
        read: ReadCalls,
        call: tuple[str, str] = ("<tool_call>", "</tool_call>"),
        think: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        """Begins a reply. `call` and `think` open and close a call and a thought; a call that "" closes goes on
        to the next one."""
        self._asked, self._read, self._call, self._think = asked, read, call, think
        self._begun = self._after_tag = asked.prompt.rstrip().endswith(think[0])
        self._state = "reasoning" if self._begun else "content"
        self._rest = ""

    def feed(self, text: str) -> list[ReplyPart]:
        self._rest += text
        out: list[ReplyPart] = []
        while self._call_ends(out) if self._state == "call" else self._text_ends(out):
            pass
        return out

    def end(self) -> list[ReplyPart]:
        rest, out = self._rest, []
        if self._state == "call":
            self._add_calls(out, rest, "")
        elif rest := rest.lstrip() if self._after_tag else rest:
            self._add(out, rest)
        return out

    def _text_ends(self, out: list[ReplyPart]) -> bool:
        """Takes what is certain of a content or thought; returns True if a tag has ended it."""
        if self._after_tag or not self._begun:
            bare = self._rest.lstrip()
            if self._after_tag:
                self._rest = bare
            elif bare.startswith(self._think[0]):
                self._enter("reasoning", bare[len(self._think[0]) :])
                return True
            elif bare.startswith(self._think[1]):  # of a thought that the template leaves out
                self._enter("content", bare[len(self._think[1]) :])
                return True
            elif any(tag.startswith(bare) for tag in self._think):
                return False
        self._begun = True
        tag = self._think[1] if self._state == "reasoning" else self._call[0]
        if not self._asked.tools and self._state == "content":
            tag = ""
        place = self._rest.find(tag) if tag else -1
        if place >= 0:
            self._add(out, self._rest[:place].rstrip())
            then = "content" if self._state == "reasoning" else "call"
            self._enter(then, self._rest[place + len(tag) :])
            return True
        certain = self._rest[: len(self._rest) - held_back(self._rest, (tag,))].rstrip()
        self._add(out, certain)
        self._rest = self._rest[len(certain) :]
        return False

    def _call_ends(self, out: list[ReplyPart]) -> bool:
        """Takes a call if it is whole; returns whether it was."""
        open_, close = self._call
        body, found, after = self._rest.partition(close or open_)
        if found:
            self._add_calls(out, body, close)
            self._enter("content" if close else "call", after)
        return bool(found)

    def _add_calls(self, out: list[ReplyPart], body: str, close: str) -> None:
        whole = bool(close) or not self._call[1]
        calls = self._read(body, self._asked) if whole else []
        sound = [part for part in calls if part is not None]
        if sound and len(sound) == len(calls):
            out += sound
        else:
            out.append(ReplyPart("content", self._call[0] + body + close))

    def _add(self, out: list[ReplyPart], text: str) -> None:
        if text:
            out.append(ReplyPart("reasoning" if self._state == "reasoning" else "content", text))
            self._after_tag = False

    def _enter(self, state: str, rest: str) -> None:
        self._state, self._rest, self._begun, self._after_tag = state, rest, True, True


def hermes(body: str, asked: ReplyRequest) -> list[ReplyPart | None]:
    """Reads `{"name": "f", "arguments": {"n": 1}}`."""
    return [call_of_json(body)]


def qwen_xml(body: str, asked: ReplyRequest) -> list[ReplyPart | None]:
    """Reads `<function=f><parameter=n>1</parameter></function>`, with a line for each tag and value."""
    found = _FUNCTION.fullmatch(body)
    return [call_of_texts(found[1], _PARAMETER.findall(found[2]), asked) if found else None]


def glm(body: str, asked: ReplyRequest) -> list[ReplyPart | None]:
    """Reads `f<arg_key>n</arg_key><arg_value>1</arg_value>`, with a line for each."""
    name = body.partition("<arg_key>")[0]
    texts = _ARGUMENT.findall(body[len(name) :])
    if _ARGUMENT.sub("", body[len(name) :]).strip() or len(name.split()) != 1:
        return [None]
    return [call_of_texts(name, texts, asked)]


def mistral(body: str, asked: ReplyRequest) -> list[ReplyPart | None]:
    """Reads `[{"name": "f", "arguments": {"n": 1}}, …]`, and the newer `f[ARGS]{"n": 1}`."""
    if body.lstrip().startswith("["):
        try:
            return [*map(call_of_json, msgspec.json.decode(body, type=list[msgspec.Raw]))]
        except (ValueError, RecursionError):
            return [None]
    found = _NAMED.fullmatch(body)
    return [call(found[1], found[2]) if found else None]
