"""The texts in a chat template by which the format of a model's replies is known. The parsers are in
rollout/reply_formats/. Imports no torch."""

from areal_q.errors import TaskError

OF_CALLS: dict[str, tuple[str, ...]] = {
    "gpt-oss": ("<|channel|>",),
    "glm": ("<arg_key>",),
    "qwen-xml": ("<function=",),
    "mistral": ("[TOOL_CALLS]",),
    "hermes": ("<tool_call>",),
    "llama-json": ('"parameters": dictionary of argument name and its value', "<|python_tag|>"),
}
"""Texts in a chat template that writes calls in this format. One of them is enough, and the first format that
has one is taken."""
_THOUGHTS = ("<think>", "</think>")


def reply_format_of(template: str, name: str = "auto") -> str:
    """Returns `name`, which is `task.chat.reply_format`: "auto" is the format of the template's calls, that of
    its thoughts where it has no calls that are known, and "text" where it has neither."""
    if name != "auto":
        return name
    if (found := _of_calls(template)) is not None:
        return found
    return "hermes" if any(sign in template for sign in _THOUGHTS) else "text"


def check_calls_are_read(template: str, name: str = "auto") -> None:
    """Raises TaskError if calls of tools would come back as text and nobody has asked for that."""
    if name == "auto" and _of_calls(template) is None:
        raise TaskError(
            "the chat template writes calls of tools in a format that is not known here: "
            f"task.chat.reply_format must name one of {', '.join(OF_CALLS)}, or text, "
            "with which they are content"
        )


def _of_calls(template: str) -> str | None:
    known = (name for name, signs in OF_CALLS.items() if any(sign in template for sign in signs))
    return next(known, None)
