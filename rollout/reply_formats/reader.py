"""Reads the replies of one model, in the format of its chat template."""

from collections.abc import Sequence

from areal_q.tasks.base import Tokenizer, Tool
from areal_q.tasks.encoding.reply_signs import check_calls_are_read
from rollout.reply_formats.base import ReplyPart, ReplyRequest, joined
from rollout.reply_formats.table import format_of

PROMPT_TAIL = 16
"""Tokens at the end of a prompt that may hold the beginning of a thought"""


class ReplyReader:
    """The format of a tokenizer's replies, and the special tokens that have a part in it."""

    def __init__(self, tokenizer: Tokenizer, name: str = "auto") -> None:
        """`name` is `task.chat.reply_format`."""
        self._tokenizer, self._name = tokenizer, name
        self.format = format_of(tokenizer, name)
        marks = (*self.format.shown, *self.format.ends)
        named = {tokenizer.decode([i]): i for i in tokenizer.special_ids} if marks else {}
        shown = {named[token] for token in self.format.shown if token in named}
        self.ends = frozenset(named[token] for token in self.format.ends if token in named)
        """Tokens that end a reply with a call, beside the tokenizer's stops"""
        self.no_text = tokenizer.special_ids - shown
        """Special tokens that are no text to the format's parser"""

    def check_calls(self) -> None:
        """Raises TaskError if calls of tools would come back as text and the settings do not ask for that."""
        check_calls_are_read(self._tokenizer.template, self._name)

    def parts(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> list[ReplyPart]:
        """Returns the parts of a whole reply to a prompt with these tools."""
        tail = self._tokenizer.decode(prompt[-PROMPT_TAIL:])
        parser = self.format.parser(ReplyRequest(tools, tail))
        text = self._tokenizer.decode([i for i in ids if i not in self.no_text])
        return joined([*parser.feed(text), *parser.end()])
