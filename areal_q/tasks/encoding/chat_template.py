"""Chat templates: conversations as text, how a reply begins and ends there, and contents that cannot pass for
control tokens. Imports no torch."""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_q.config.tasks import Chat
from areal_q.errors import ConfigError, TaskError
from areal_q.messages.tokens import common
from areal_q.tasks.base import NO_VARIABLES, Message, Tool, Variables
from areal_q.tasks.encoding.text_ids import TextIds
from areal_q.tasks.encoding.transcripts import assistant_parts

MARK = "\x02the assistant\x03"
"""A text that no chat template changes and no conversation contains"""
_PROBE = "what this role says"
"""A text that every filter of a template leaves as it is"""
_ASKED: Message = {"role": "user", "content": "."}
_REPLY: Message = {"role": "assistant", "content": MARK}
_PROBED: Any = {"name": "a_probed_function", "arguments": {"x": "what is asked of it"}}
"""What is called: a tool whose name and argument no template changes"""
_CALL: Any = {"id": "probe0000", "type": "function", "function": _PROBED}
_TOOL: Tool = {
    "type": "function",
    "function": {"name": _PROBED["name"], "description": _PROBE, "parameters": {"type": "object"}},
}
"""The tool that it calls"""
_LAST = "the last argument"
"""An argument that JSON spells as it is"""
_DATE = (
    "{% macro strftime_now(format) %}{% set it = namespace(text=format) %}"
    "{% for name, value in fixed_date.items() %}{% set it.text = it.text | replace(name, value) %}{% endfor %}"
    "{{ it.text }}{% endmacro +%}"
)
"""Takes the place of transformers' function of that name, which gives today's date. transformers passes plain
values to a template, but no function, so that the directives come as a table."""
_DIRECTIVES = [f"%{letter}" for letter in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ"]
_DIRECTIVES += [f"%-{letter}" for letter in "deHIjklmMSuUVWy"]


class ChatTemplate:
    """The chat template of tokenizer `hf`, with the settings `chat`; of several the one `named` so."""

    def __init__(self, hf: Any, chat: Chat, named: str = "default") -> None:
        """Gives the tokenizer the template in the file that the settings name, if they name one. Raises
        ConfigError if that cannot be read, or there is none of that name."""
        self._hf, self._chat = hf, chat
        self._ids = TextIds(hf, chat.split_special)
        # One for conversations with tools may take it for granted that there are some.
        self._always = [_TOOL] if named == "tool_use" else []
        self.text = _text_of(hf, chat.template_file, named)
        self._variables: dict[str, Any] = dict(chat.template_args)
        self._roles: dict[str, str] = {}
        """The role under which the template renders messages, by role, of those that were met"""
        self._as_json: dict[bool, bool | None] = {}
        """True if the template reads arguments of calls as JSON, by whether the message has a content too; None
        if it leaves calls out"""
        if "strftime_now" in self.text:
            day = datetime.fromisoformat(chat.date) if chat.date else datetime.now()
            self._variables["fixed_date"] = {name: day.strftime(name) for name in _DIRECTIVES}
        self._rendered = _DATE + self.text if "fixed_date" in self._variables else self.text
        added = {token.content: token for token in hf.added_tokens_decoder.values()}
        self._added = _any_of(added)
        # tokenizer.json need not call special what tokenizer_config.json does.
        called = hf.all_special_tokens
        special = {text for text, token in added.items() if token.special or text in called}
        last, earlier = self._around_reply(False), self._around_reply(True)
        after = last[1].strip() if last else ""
        end = self._added.match(after)
        self.end = end[0] if end and (end[0] in special or end[0] == after) else None
        """The token that follows an assistant's message: a special one, or one that stands alone there; None if
        that is another text"""
        special |= {self.end} if self.end else set()
        written = "".join(earlier or last or ()) + self._around_result()
        self._control = _any_of(t for t in added if t in special or (t.strip() and t in written))
        """Matches special tokens, and others that begin or end a turn, such as DeepSeek's <｜User｜>, or the
        result of a tool, such as Qwen's <tool_response>"""
        self._special = _any_of(special)
        around = [both for both in (last, earlier) if both]
        ends = (self._special.match(both[1].lstrip()) for both in around)
        self._ends = _any_of(end[0] for end in ends if end)
        """Matches the special tokens that end an assistant's message, a last one or another"""
        self._prefills = self._prompt_ends([both[0] for both in around])
        self.prefill = next(iter(self._prefills), "")

    def prompt(self, prompt: str | Sequence[Message]) -> list[Message]:
        """Returns a problem's prompt as messages, after the system message of the settings."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if self._chat.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._chat.system})
        return messages

    def encode(
        self,
        messages: Sequence[Message],
        variables: Variables = NO_VARIABLES,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of the conversation and of the beginning of the reply. Raises TaskError with the
        template's words if it refuses the messages, and for a role, tools or calls of tools that it leaves
        out."""
        self._check_tools(tools)
        talk = self._hide(self._in_form(messages))
        return self._ids.of(self._render(talk, variables=variables, tools=self._hide([*tools])))

    def encode_transcript(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[int], list[bool]]:
        """Returns a whole conversation, and which ids its assistant wrote; see Tokenizer."""
        self._check_tools(tools)
        talk, given = self._hide(self._in_form(self.prompt(messages))), self._hide([*tools])
        text, parts = assistant_parts(
            lambda said, reply: self._render(said, reply, tools=given),
            talk,
            self._prefills,
            self._special,
            self._ends,
        )
        ids = self._ids.of(text[: parts[-1].stop])
        learnt = [False] * len(ids)
        for part in parts:
            start, stop = (common(self._ids.of(text[:end]), ids) for end in part)
            learnt[start:stop] = [True] * (stop - start)
        return ids, learnt

    def encode_turn(
        self,
        messages: Sequence[Message],
        ended: bool,
        variables: Variables,
        calls: Sequence[Any] = (),
    ) -> list[int]:
        """Returns what stands between the contents of two assistant's messages; see Tokenizer."""
        talk = [_ASKED, _called(calls) if calls else _REPLY, *messages]
        text = self._render(self._hide(self._in_form(talk)), variables=variables)
        if calls:  # what ends the message stands behind the end of the last call
            tail = text.partition(_LAST)[2]
            end = self._special.search(tail)
            tail = tail[end.start() :] if end else tail
        else:
            tail = text.rpartition(MARK)[2]
        if ended and self._added.match(tail.lstrip()):
            # Encoded with the end, which may take the spaces behind it, and is left out then.
            return self._ids.of(tail.lstrip())[1:]
        return self._ids.of(tail, begins=False)

    def _render(
        self,
        messages: Sequence[Message],
        reply: bool = True,
        variables: Variables = NO_VARIABLES,
        tools: Sequence[Tool] = (),
    ) -> str:
        try:
            return self._hf.apply_chat_template(
                list(messages),
                tools=[*(tools or self._always)] or None,
                chat_template=self._rendered,
                tokenize=False,
                add_generation_prompt=reply,
                **{**self._variables, **variables},
            )
        except Exception as error:  # a template may raise anything
            why = f"{error}" or type(error).__name__
            raise TaskError(f"the chat template refuses these messages: {why}") from error

    def _in_form(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages as the template reads them: in roles that it renders, a developer's as the
        system's where it leaves out the former, and with the calls of tools in its form. Raises TaskError if it
        leaves out a role, or the calls, altogether."""
        for role in dict.fromkeys(m["role"] for m in messages if m["role"] not in self._roles):
            names = (role, "system") if role == "developer" else (role,)
            shown = next((name for name in names if self._shows(name)), None)
            if shown is None:
                raise TaskError(f"the chat template leaves out messages of the role {role!r}")
            self._roles[role] = shown
        talk = [{**m, "role": self._roles[m["role"]]} for m in messages]
        return [self._with_calls(m) if m.get("tool_calls") else m for m in talk]

    def _with_calls(self, message: Message) -> Message:
        """Returns an assistant's message with its calls as the template reads them: with arguments that are
        objects, or their JSON. Raises TaskError if it leaves them out."""
        said = bool(message["content"])
        if said not in self._as_json:
            forms = (form for form in (False, True) if self._shows_call(said, form))
            self._as_json[said] = next(forms, None)
        if (as_json := self._as_json[said]) is None:
            beside = " beside a content" if said else ""
            raise TaskError(f"the chat template leaves out `tool_calls`{beside}")
        return _in_json(message) if as_json else message

    def _shows_call(self, said: bool, as_json: bool) -> bool:
        message = {"role": "assistant", "content": _PROBE * said, "tool_calls": [_CALL]}
        try:
            text = self._render([_ASKED, _in_json(message) if as_json else message], reply=False)
        except TaskError:
            return False
        return _PROBED["name"] in text and _PROBED["arguments"]["x"] in text and "{'x'" not in text

    def _check_tools(self, tools: Sequence[Tool]) -> None:
        if tools and not self._shows_tools:
            raise TaskError("the chat template leaves out `tools`")

    @cached_property
    def _shows_tools(self) -> bool:
        try:
            text = self._render([_ASKED], tools=[_TOOL])
        except TaskError:
            return False
        return _PROBED["name"] in text

    def _shows(self, role: str) -> bool:
        """Returns True unless the template leaves out what `role` says. A template that refuses the role counts
        for a developer alone, since it says so itself where the role is used."""
        said = {"role": role, "content": _PROBE}
        before = [] if role in ("system", "developer", "user") else [_ASKED]
        before += [{**_REPLY, "content": "."}] if role == "tool" else []
        try:
            return _PROBE in self._render([*before, said, *[_ASKED] * (role != "user")])
        except TaskError:
            return role != "developer"

    def _around_reply(self, goes_on: bool) -> tuple[str, str] | None:
        """Returns the text before and after the content of an assistant's message, which is the last one or, if
        `goes_on`, is followed by one of the user; None if the template refuses that or leaves it out."""
        try:
            text = self._render([_ASKED, _REPLY, *[_ASKED] * goes_on], reply=False)
        except TaskError:
            return None
        before, found, after = text.rpartition(MARK)
        return (before, after) if found else None

    def _around_result(self) -> str:
        """Returns what the template writes between the results of two tools, which ends the one and begins the
        other; "" if it takes none."""
        called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        try:
            result = {"role": "tool", "content": MARK, "tool_call_id": _CALL["id"]}
            talk = self._in_form([_ASKED, called, result, result])
            parts = self._render(talk, reply=False).split(MARK)
        except TaskError:
            return ""
        return parts[1] if len(parts) == 3 else ""

    def _prompt_ends(self, befores: Sequence[str]) -> list[str]:
        """Returns what the prompt for a reply has beyond each of the texts before an assistant's content that
        it begins with. That of a last message comes first: some templates write an empty thought before it, as
        they do in the prompt for a reply without a thought, which then is no part of the reply."""
        try:
            asked = self._render([_ASKED])
        except TaskError:
            return []
        return [asked[len(b) :] for b in befores if asked.startswith(b)]

    def _hide(self, said: Any) -> Any:
        """Returns messages, tools or a part of them with every control token in their texts replaced by a
        mark."""
        if not self._chat.split_special:
            return said
        match said:
            case str():
                return self._ids.marked(self._control, said)
            case dict():
                return {name: self._hide(value) for name, value in said.items()}
            case list():
                return [self._hide(value) for value in said]
        return said


def _text_of(hf: Any, file: str | None, named: str) -> str:
    """Returns the text of the template, which is in `file` if there is one."""
    if file:
        try:
            hf.chat_template = Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
            raise ConfigError(f"task.chat.template_file: {file}: {why}") from error
    found = hf.chat_template
    several: dict[str, str] = found if isinstance(found, dict) else {named: found}
    if named not in several:
        raise ConfigError(
            f"the tokenizer has no {named} chat template, only {', '.join(sorted(several))}: name a file "
            "with the one to use: task.chat.template_file=FILE"
        )
    return several[named]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of `texts`, the longest first; nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _in_json(message: Message) -> Message:
    def convert(call: Any) -> Any:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return {**message, "tool_calls": [convert(call) for call in message["tool_calls"]]}


def _called(calls: Sequence[Any]) -> Message:
    """Returns the assistant's message with these calls, the last of which has the argument _LAST."""
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {"x": _LAST}}}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}


def joined(
    messages: Sequence[Message],
    variables: Variables = NO_VARIABLES,
    tools: Sequence[Tool] = (),
) -> str:
    """Returns the contents one after the other, where there is no template. Raises TaskError for what only a
    template can take: variables, tools and their calls."""
    given = {
        **variables,
        "tools": tools,
        "tool_calls": [m for m in messages if m.get("tool_calls")],
    }
    taken = [name for name in given if name in variables or given[name]]
    if taken:
        raise TaskError(f"there is no chat template here to take {', '.join(taken)}")
    return "".join(m["content"] for m in messages)
