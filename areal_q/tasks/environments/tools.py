"""A tool for the model: a method's signature and docstring as OpenAI's API describes a function.

    def add(self, a: int, b: int = 0) -> int:      {"type": "function", "function": {"name": "add",
        '''Adds two numbers.                         "description": "Adds two numbers.",
                                                     "parameters": {"type": "object", "properties":
        Args:                                          {"a": {"type": "integer", "description": "the first"},
            a: the first                                "b": {"type": "integer", "default": 0}},
        '''                                            "required": ["a"]}}}

The same types check the arguments of a call. Imports no torch.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from areal_q.config import Chat, PythonEnvironment
from areal_q.errors import TaskError
from areal_q.plugins import place_of
from areal_q.tasks.base import Message, Tokenizer, Tool
from areal_q.tasks.encoding.reply_signs import check_calls_are_read

_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r" {1,4}(\w+)(?: ?\([^)]*\))?: *(.*)")
_CALL: Any = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OwnTool(NamedTuple):
    """A method that the model may call."""

    described: Tool
    arguments: type[msgspec.Struct]
    """What the JSON of a call's arguments is decoded as"""


def tool_of(owner: type, name: str) -> OwnTool:
    """Returns the method `name` of the class as a tool. Raises TaskError, with its line, if it has no
    docstring, or a parameter has no type hint, or one that JSON does not know."""
    function: Callable[..., Any] = getattr(owner, name)
    where = f"{place_of(function)}: {name}"
    said, notes = _documented(function)
    if not said:
        raise TaskError(
            f"{where}: a tool needs a docstring; the name of what is none begins with _"
        )
    parameters = [*inspect.signature(function).parameters.values()]
    if inspect.isfunction(inspect.getattr_static(owner, name)):
        parameters = parameters[1:]  # without self
    try:
        hints = get_type_hints(function, include_extras=True)
        fields = [_field(p, hints, notes, where) for p in parameters]
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        _, schemas = msgspec.json.schema_components([arguments])
    except TaskError:
        raise
    except (TypeError, ValueError, NameError) as error:
        why = " ".join(str(error).split())
        raise TaskError(f"{where}: its arguments cannot be described: {why}") from error
    schema = schemas.pop(name)
    shown = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
    if schemas:
        shown["$defs"] = schemas
    function_of = {"name": name, "description": said, "parameters": shown}
    return OwnTool({"type": "function", "function": function_of}, arguments)


def check_tools(
    tools: Sequence[Tool], tokenizer: Tokenizer, cfg: PythonEnvironment, chat: Chat | None
) -> None:
    """Raises TaskError if the model's chat template leaves out tools, their calls or their results, or writes
    calls in a format that nothing here reads, or if the description of `tools` alone takes more than
    `cfg.max_given_tokens`."""
    if not tools:
        return
    asked: Message = {"role": "user", "content": ""}
    result: Message = {"role": "tool", "tool_call_id": _CALL["id"], "content": "."}
    try:
        with_tools = tokenizer.encode_messages(tokenizer.opened([asked]), tools=tools)
        tokenizer.encode_turn([result], True, calls=[_CALL])
        check_calls_are_read(tokenizer.template, chat.reply_format if chat else "auto")
    except TaskError as error:
        raise TaskError(f"rollout.environment: {cfg.path} has tools: {error}") from error
    taken = len(with_tools) - len(tokenizer.encode_messages([asked]))
    if taken > cfg.max_given_tokens:
        raise TaskError(
            f"rollout.environment.max_given_tokens = {cfg.max_given_tokens}: the description of its "
            f"tools alone takes {taken}"
        )


def signature_of(tool: Tool) -> str:
    """Returns a tool in one line for a reader, such as "add(a: integer, b: integer = 0)"."""
    function = tool["function"]
    shown: list[str] = []
    for name, schema in function["parameters"].get("properties", {}).items():
        kind = f": {schema['type']}" if "type" in schema else ""
        default = f" = {json.dumps(schema['default'])}" if "default" in schema else ""
        shown.append(f"{name}{kind}{default}")
    return f"{function['name']}({', '.join(shown)})"


def _field(
    parameter: inspect.Parameter, hints: dict[str, Any], notes: dict[str, str], where: str
) -> Any:
    """Returns a parameter as a field of a Struct: (name, type), or with its default."""
    name = parameter.name
    if parameter.kind not in _BY_NAME:
        raise TaskError(f"{where}: {parameter} cannot be given by name")
    if name not in hints:
        raise TaskError(f"{where}: its parameter {name} needs a type hint")
    hint = hints[name]
    if name in notes:
        hint = Annotated[hint, msgspec.Meta(description=notes[name])]
    return (name, hint) if parameter.default is parameter.empty else (name, hint, parameter.default)


def _documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Returns what a docstring says before its sections, and what `Args:` says of each argument."""
    said, *sections = _SECTION.split(inspect.getdoc(function) or "")
    notes: dict[str, str] = {}
    name = ""
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        for line in body.splitlines() if title.startswith("Arg") else ():
            if found := _ARGUMENT.fullmatch(line):
                name = found[1]
                notes[name] = found[2]
            elif name and line.strip():
                notes[name] += f" {line.strip()}"
    return said.strip(), notes
