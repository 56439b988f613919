"""Chooses a model's tokenizer: that of characters, for the small model, or Hugging Face's. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_q.config.tasks import Chat
from areal_q.errors import CheckpointError, TaskError
from areal_q.tasks.base import NO_VARIABLES, Message, Stop, Tokenizer, Tool, Variables
from areal_q.tasks.encoding.chat_template import joined
from areal_q.tasks.encoding.hf_tokenizer import HFTokenizer

_LARGEST = 1 << 16
"""Bytes of a file beyond which it is not that of CharTokenizer"""
CHARACTERS = "0123456789+-*/()=.,% "
PAD, EOS = "<pad>", "<eos>"


class CharTokenizer:
    """A tokenizer with one id for each character: <pad> is 0, <eos> is 1, and `CHARACTERS` follow in order.

    Example: encode("12+34=") == [3, 4, 12, 5, 6, 18]
    """

    def __init__(self) -> None:
        self._vocab = {token: i for i, token in enumerate((PAD, EOS, *CHARACTERS))}
        self._tokens = [*self._vocab]
        self.vocab_size = len(self._vocab)
        self.pad_id, self.eos_id = self._vocab[PAD], self._vocab[EOS]
        self.stops: Mapping[int, Stop] = {self.eos_id: Stop(EOS, ("tokenizer",))}
        self.special_ids = frozenset({self.pad_id, self.eos_id})
        self.template = self.prefill = ""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`. Raises TaskError naming a character that is not in the vocabulary."""
        try:
            return [self._vocab[c] for c in text]
        except KeyError as error:
            raise TaskError(
                f"character {error.args[0]!r} of {text!r}: the built-in model reads only {CHARACTERS!r}; "
                "for other text use model.type=pretrained model.path=DIR"
            ) from error

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        return self.encode(prompt) if isinstance(prompt, str) else self.encode_messages(prompt)

    def encode_messages(
        self,
        messages: Sequence[Message],
        variables: Variables = NO_VARIABLES,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Returns the ids of the contents, one after the other, since this tokenizer has no roles."""
        return self.encode(joined(messages, variables, tools))

    def encode_transcript(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        """Returns the contents one after the other, those of the assistant followed by <eos>."""
        joined(messages, tools=tools)  # refuses what only a template can take
        ids: list[int] = []
        learnt: list[bool] = []
        for message in messages:
            own = message["role"] == "assistant"
            said = self.encode(message["content"]) + [self.eos_id] * own
            ids, learnt = ids + said, learnt + [own] * len(said)
        return ids, learnt

    def opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def encode_turn(
        self,
        messages: Sequence[Message],
        ended: bool,
        variables: Variables = NO_VARIABLES,
        calls: Sequence[Any] = (),
    ) -> list[int]:
        return self.encode_messages(messages, variables)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters; <pad> and <eos>, which stand for none, are left out."""
        return "".join(self._tokens[i] for i in ids if i not in self.special_ids)

    def save(self, directory: str) -> None:
        """Writes tokenizer.json and tokenizer_config.json."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        for name, value in (
            ("tokenizer.json", self._pipeline()),
            ("tokenizer_config.json", settings),
        ):
            (Path(directory) / name).write_text(json.dumps(value, indent=2) + "\n")

    def wrote(self, directory: str | Path) -> bool:
        """Returns True if `directory` holds this very tokenizer."""
        file = Path(directory) / "tokenizer.json"
        try:
            if file.stat().st_size > _LARGEST:  # a real model's has megabytes
                return False
            return json.loads(file.read_bytes()) == self._pipeline()
        except (OSError, ValueError, RecursionError):
            return False

    def _pipeline(self) -> dict[str, Any]:
        """Returns the `tokenizers` library's description: split into characters, look each one up."""
        special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": self._vocab[t], "content": t, **special, "special": True} for t in (PAD, EOS)
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"[\s\S]"},
                "behavior": "Isolated",
                "invert": False,
            },
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            # No unknown token: like `encode`, the library refuses a character that it does not know.
            "model": {"type": "WordLevel", "vocab": self._vocab, "unk_token": ""},
        }


def load_tokenizer(path: str | Path, chat: Chat | None = None) -> Tokenizer:
    """Returns the tokenizer in directory `path`, with its chat template by the settings `chat`; None leaves
    prompts bare text. The one of characters does not need transformers, all others do. Raises CheckpointError
    or ConfigError if it cannot be loaded."""
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: no such directory")
    small = CharTokenizer()
    return small if small.wrote(path) else HFTokenizer(path, chat)
