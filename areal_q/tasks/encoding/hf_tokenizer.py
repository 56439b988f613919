"""The tokenizer of a Hugging Face directory, with or without its chat template. Imports no torch."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_q.config.tasks import Chat
from areal_q.errors import CheckpointError, ConfigError, TaskError, installing, said_by
from areal_q.tasks.base import NO_VARIABLES, Message, Stop, Tool, Variables
from areal_q.tasks.encoding.chat_template import ChatTemplate, joined
from areal_q.tasks.encoding.text_ids import TextIds
from areal_q.tasks.stops import collect_stops

_FILES = ("*tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Names of files that hold a tokenizer's vocabulary, and of its settings"""
_SETTINGS = "tokenizer_config.json"
_TOOL_USE = "tool_use"
"""The name by which transformers takes a template where tools are given"""
_QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_OTHERS = ("TokenizersBackend", "PreTrainedTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast")
_TAKEN = {
    "llama": _QWEN2 + _OTHERS,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2 + _OTHERS,
    "qwen3_moe": _QWEN2 + _OTHERS,
}
"""Classes that AutoTokenizer takes as tokenizer_config.json names them, by the model_type of config.json"""


class HFTokenizer:
    """A Tokenizer (areal_q/tasks/base.py) with a chat template, by the settings `chat`, or with None, for bare
    text."""

    def __init__(self, path: str | Path, chat: Chat | None = None) -> None:
        """Loads the tokenizer. Raises ConfigError if the `hf` extra is not installed or there is no chat
        template, and CheckpointError for files that cannot be read or name no end."""
        self._hf = _load(path)
        if chat and not (chat.template_file or self._hf.chat_template):
            raise ConfigError(
                f"{path}: the tokenizer has no chat template; use task.template=plain, or a file of your "
                "own: task.chat.template_file=FILE"
            )
        self._ids = TextIds(self._hf, marked=False)
        self._chat = ChatTemplate(self._hf, chat) if chat else None
        self._calling = self._chat
        """The template of conversations with tools, which some models have beside the other"""
        if (
            chat
            and isinstance(self._hf.chat_template, dict)
            and _TOOL_USE in self._hf.chat_template
        ):
            self._calling = ChatTemplate(self._hf, chat, _TOOL_USE)
        self.vocab_size: int = len(self._hf)
        chats = dict.fromkeys(it for it in (self._chat, self._calling) if it)
        ends = [self._hf.convert_tokens_to_ids(it.end) for it in chats if it.end is not None]
        eos = self._hf.eos_token_id
        self.stops: Mapping[int, Stop] = collect_stops(
            Path(path), self._hf.convert_ids_to_tokens, eos, ends
        )
        if not self.stops:
            raise CheckpointError(f"{path}: the tokenizer has no end-of-text token")
        self.eos_id: int = next(id for id in (*ends, eos, *self.stops) if id is not None)
        # A template's end need not be called special by a file.
        self.special_ids = frozenset({*self._hf.all_special_ids, *ends})
        self.template = "\n".join(it.text for it in chats)
        self.prefill = self._chat.prefill if self._chat else ""

    def encode(self, text: str) -> list[int]:
        return self._ids.of(text, begins=False)

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Returns the ids of a prompt: with `chat` a conversation and the beginning of the reply, with `plain`
        the text after the tokenizer's own <bos>. An <eos> that the tokenizer would append is left out."""
        if self._chat:
            return self._chat.encode(self._chat.prompt(prompt))
        text = prompt if isinstance(prompt, str) else joined(prompt)
        bare, whole = self._ids.of(text), self._hf.encode(text)
        starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return [*whole[: next(starts, 0)], *bare]

    def encode_messages(
        self,
        messages: Sequence[Message],
        variables: Variables = NO_VARIABLES,
        tools: Sequence[Tool] = (),
    ) -> list[int]:
        """Encodes by the chat template; without one, the contents one after the other."""
        if chat := self._calling if tools else self._chat:
            return chat.encode(messages, variables, tools)
        return self.encode_prompt(joined(messages, variables, tools))

    def encode_transcript(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[list[int], list[bool]]:
        if chat := self._calling if tools else self._chat:
            return chat.encode_transcript(messages, tools)
        raise TaskError("a conversation needs a chat template: template = 'chat'")

    def opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        return self._chat.prompt(messages) if self._chat else messages

    def encode_turn(
        self,
        messages: Sequence[Message],
        ended: bool,
        variables: Variables = NO_VARIABLES,
        calls: Sequence[Any] = (),
    ) -> list[int]:
        if chat := self._calling if calls else self._chat:
            return chat.encode_turn(messages, ended, variables, calls)
        return self.encode(joined(messages, variables))

    def decode(self, ids: Sequence[int]) -> str:
        return self._hf.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def save(self, directory: str) -> None:
        self._hf.save_pretrained(directory)


def vocabulary_files(directory: str | Path) -> list[Path]:
    """Returns the files that tell the ids of texts: tokenizer.json, or others where there is none."""
    found = {file for pattern in _FILES for file in Path(directory).glob(pattern) if file.is_file()}
    whole = {file for file in found if file.name == "tokenizer.json"}
    return sorted(whole or {file for file in found if file.name != _SETTINGS})


def check_whole(directory: Path) -> None:
    """Raises CheckpointError for the directory of an adapter, which has no model."""
    if not (directory / "config.json").exists() and (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory}: an adapter alone is no model: merge it into its base (peft: merge_and_unload)"
        )


def _load(path: str | Path) -> Any:
    check_whole(Path(path))
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: this tokenizer needs transformers: {installing('hf')}"
        ) from error
    found = {file.name for pattern in _FILES for file in Path(path).glob(pattern)}
    if not found - {_SETTINGS}:
        # Of settings alone transformers may make a tokenizer without a token.
        raise CheckpointError(
            f"{path}: no tokenizer can be read: the directory has no vocabulary, such as tokenizer.json"
        )
    try:
        loader = getattr(transformers, _class_of(Path(path)))
        hf = loader.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # `tokenizers` raises bare ones for files of other versions
        raise CheckpointError(f"{path}: no tokenizer can be read: {said_by(error)}") from error
    for how in ("local_files_only", "is_local"):  # how it was loaded: a saved one would keep that
        hf.init_kwargs.pop(how, None)
    return hf


def _class_of(directory: Path) -> str:
    """Returns the name of the class that AutoTokenizer would choose, where the files say it plainly: its own
    imports, torch and the code of models, take seconds in each of a run's processes. Else AutoTokenizer."""
    files = (directory / name for name in ("config.json", _SETTINGS))
    try:
        model, tokenizer = (json.loads(file.read_bytes()) for file in files)
        name = tokenizer["tokenizer_class"]
        if name in _TAKEN[model["model_type"]] and "auto_map" not in tokenizer:
            return name if (directory / "tokenizer.json").is_file() else "AutoTokenizer"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass  # AutoTokenizer says what is wrong with a file.
    return "AutoTokenizer"
