"""Decodes single tokens so that the joined texts are the text of the response."""

from collections.abc import Sequence

from areal_q.config import ModelConfig, TaskConfig
from areal_q.errors import UserError
from areal_q.tasks import Tokenizer, build_tokenizer

BROKEN = "\ufffd"


class Pieces:
    """Maps token ids to texts; every id is decoded only once.

    A character of several tokens is the text of the first of them, and the others have none. A token that
    decodes to nothing is shown as ‹id›, and the small model's end of text as ‹end›. If there is no tokenizer
    (the model's directory is gone, or transformers is not installed) every token is shown by its id, and `note`
    says why.
    """

    def __init__(self, model: ModelConfig, task: TaskConfig) -> None:
        self.note = ""
        self._known: dict[int, str] = {}
        self._tokenizer: Tokenizer | None = None
        try:
            self._tokenizer = build_tokenizer(model, task)
        except UserError as error:
            self.note = f"tokens are shown by their ids: {error}"
            return
        # Some tokenizers drop a space at the start of a text, so that every token is decoded after another one.
        self._anchor = self._tokenizer.encode("0")[-1:]
        self._head = len(self._tokenizer.decode(self._anchor))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """Returns one text for each token."""
        texts = [self._text(id) for id in ids]
        start = 0
        while start < len(texts):
            stop = start
            while stop < len(texts) and BROKEN in texts[stop]:
                stop += 1
            if stop - start > 1:
                texts[start:stop] = [self._decode(ids[start:stop]), *[""] * (stop - start - 1)]
            start = stop + 1
        return texts

    def _text(self, id: int) -> str:
        if id not in self._known:
            ends = self._tokenizer is not None and id in self._tokenizer.stops
            self._known[id] = self._decode([id]) or ("‹end›" if ends else f"‹{id}›")
        return self._known[id]

    def _decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None or max(ids) >= self._tokenizer.vocab_size:
            return ""
        return self._tokenizer.decode([*self._anchor, *ids])[self._head :]
