"""Tokenizers: one of characters for the small model, and Hugging Face's. Imports no torch."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_q.errors import CheckpointError, ConfigError, TaskError
from areal_q.tasks.base import Message, Tokenizer

CHARACTERS = "0123456789+-*/()=.,% "
PAD, EOS = "<pad>", "<eos>"
MARK = "\x02the assistant\x03"
"""A text that no chat template changes and no conversation contains"""


class CharTokenizer:
    """A tokenizer with one id for each character: <pad> is 0, <eos> is 1, and `CHARACTERS` follow in order.

    Example: encode("12+34=") == [3, 4, 12, 5, 6, 18]
    """

    def __init__(self) -> None:
        self._vocab = {token: i for i, token in enumerate((PAD, EOS, *CHARACTERS))}
        self._tokens = [*self._vocab]
        self.vocab_size = len(self._vocab)
        self.pad_id, self.eos_id = self._vocab[PAD], self._vocab[EOS]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`. Raises TaskError naming a character that is not in the vocabulary."""
        try:
            return [self._vocab[c] for c in text]
        except KeyError as error:
            raise TaskError(
                f"character {error.args[0]!r} of {text!r}: the built-in model reads only {CHARACTERS!r}; "
                "for other text use model.type=pretrained model.path=DIR"
            ) from error

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of the contents, one after the other, since this tokenizer has no roles."""
        return self.encode("".join(m["content"] for m in messages))

    def encode_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        return self.encode_messages(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters; <pad> and <eos> are left out."""
        return "".join(self._tokens[i] for i in ids if i not in (self.pad_id, self.eos_id))

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
        try:
            return json.loads((Path(directory) / "tokenizer.json").read_bytes()) == self._pipeline()
        except (OSError, ValueError):
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


class HFTokenizer:
    """A Hugging Face tokenizer. `template` is `chat` (its own chat template) or `plain` (bare text)."""

    def __init__(self, path: str | Path, template: str = "plain") -> None:
        """Loads the tokenizer. Raises ConfigError if the `hf` extra is not installed or the chat template is
        missing, and CheckpointError for files that cannot be read."""
        try:
            transformers = importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{path}: this tokenizer needs transformers: pip install 'areal-q[hf]'"
            ) from error
        try:
            self._hf = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            line = str(error).strip().splitlines()[0]
            raise CheckpointError(f"{path}: no tokenizer can be read: {line}") from error
        if self._hf.eos_token_id is None:
            raise CheckpointError(f"{path}: the tokenizer has no end-of-text token")
        if template == "chat" and not self._hf.chat_template:
            raise ConfigError(
                f"{path}: the tokenizer has no chat template; use task.template=plain"
            )
        self._template = template
        self.vocab_size: int = len(self._hf)
        self.eos_id: int = self._hf.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._hf.encode(text, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt. With `chat` it is one user message and the beginning of the reply, with
        `plain` the text after the tokenizer's own <bos>."""
        if self._template == "plain":
            return self._hf.encode(text)
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Encodes by the chat template; without one, the contents one after the other."""
        if self._template == "plain":
            return self._hf.encode("".join(m["content"] for m in messages))
        return self._hf.encode(self._rendered(messages), add_special_tokens=False)

    def encode_turn(self, messages: Sequence[Message], ended: bool) -> list[int]:
        """Returns what the template puts after the content of an assistant's message that stands before
        them."""
        if self._template == "plain":
            return self.encode("".join(m["content"] for m in messages))
        first = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        tail = self._rendered([*first, *messages]).rpartition(MARK)[2]
        return self.encode(tail.removeprefix(self._hf.eos_token) if ended else tail)

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._hf.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )

    def decode(self, ids: Sequence[int]) -> str:
        return self._hf.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def save(self, directory: str) -> None:
        self._hf.save_pretrained(directory)


def load_tokenizer(path: str | Path, template: str = "plain") -> Tokenizer:
    """Returns the tokenizer in directory `path`. The one of characters does not need transformers, all others
    do. Raises CheckpointError or ConfigError if it cannot be loaded."""
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: no such directory")
    small = CharTokenizer()
    return small if small.wrote(path) else HFTokenizer(path, template)
