"""Parts of texts as the ids that they have in the whole text: after other text, between added tokens, and with
control tokens that are text. Imports no torch."""

import importlib
import re
from functools import cached_property
from itertools import chain
from typing import Any

_MARK = re.compile(r"(?:\x02|\\u0002)([0-9]+)(?:\x03|\\u0003)")
"""A control token that is text, by its id, also as JSON spells it"""
_NEVER = re.compile(r"(?!)")


class TextIds:
    """Encodes texts with the tokenizer `hf`, and knows marks in them if they are `marked`."""

    def __init__(self, hf: Any, marked: bool) -> None:
        self._hf = hf
        self._mark = _MARK if marked else _NEVER

    def of(self, text: str, begins: bool = True) -> list[int]:
        """Returns the ids of `text`, which stands behind other text unless it `begins` one. Marks become the
        text of their tokens again, which is encoded together with what stands around it between two added
        tokens, but not as an added token."""
        inside = not begins and self._differs_inside
        if not inside and not self._mark.search(text):
            return self._encode(text)
        ids: list[int] = []
        done = 0
        for start, end in self._between_added(text):
            if self._mark.search(text, start, end) or (inside and start == 0 < end):
                ids += self._encode(text[done:start])
                ids += self._piece(
                    self._mark.sub(self._token, text[start:end]), begins and start == 0
                )
                done = end
        return ids + self._encode(text[done:])

    def marked(self, tokens: re.Pattern[str], text: str) -> str:
        """Returns `text` with a mark in place of each of the added tokens that `tokens` matches."""
        ids = self._hf.convert_tokens_to_ids
        return tokens.sub(lambda found: f"\x02{ids(found[0])}\x03", text)

    def _encode(self, text: str) -> list[int]:
        return self._hf.encode(text, add_special_tokens=False)

    def _token(self, mark: re.Match[str]) -> str:
        return self._hf.convert_ids_to_tokens(int(mark[1])) or mark[0]

    @cached_property
    def _differs_inside(self) -> bool:
        """True if text that stands behind other text has other ids than at the beginning, as with the `▁` that
        some put before a first word alone."""
        fast = hasattr(self._hf, "backend_tokenizer")
        return fast and self._words("a", begins=True) != self._words("a", begins=False)

    def _between_added(self, text: str) -> list[tuple[int, int]]:
        """Returns the places in `text` between its added tokens. Spaces that are part of a token, by its
        `lstrip` or `rstrip`, are in none."""
        tokens = self._finder.encode(text).offsets
        bounds = [0, *chain.from_iterable(tokens), len(text)]
        return [*zip(bounds[::2], bounds[1::2], strict=True)]

    @cached_property
    def _finder(self) -> Any:
        """A tokenizer that knows the added tokens and no other, so that it leaves out all other text."""
        library = importlib.import_module("tokenizers")
        finder = library.Tokenizer(library.models.BPE())
        if normalizer := self._hf.backend_tokenizer.normalizer:
            finder.normalizer = normalizer
        finder.add_tokens([*self._hf.added_tokens_decoder.values()])
        return finder

    def _piece(self, text: str, begins: bool) -> list[int]:
        """Encodes what stands between two added tokens without looking for any: the further steps of the
        `tokenizers` library."""
        tokenize = self._hf.backend_tokenizer.model.tokenize
        return [token.id for word in self._words(text, begins) for token in tokenize(word)]

    def _words(self, text: str, begins: bool) -> list[str]:
        """Returns what the model of the tokenizer gets. Some have another first word where a text `begins`."""
        backend = self._hf.backend_tokenizer
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        words = importlib.import_module("tokenizers").PreTokenizedString("." * (not begins) + text)
        if not begins:
            # It does not stand at the place 0 then, by which the library knows a beginning.
            words.split(lambda _, whole: [whole[1:]])
        if backend.pre_tokenizer:
            backend.pre_tokenizer.pre_tokenize(words)
        return [word for word, *_ in words.get_splits()]
