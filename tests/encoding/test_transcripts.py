"""What a conversation's assistant wrote, by templates of public models and by templates written here."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.chain_models import CHATML, byte_tokenizer
from helpers.paths import ROOT
from transformers import AutoTokenizer

from areal_q.config import Chat
from areal_q.errors import TaskError
from areal_q.tasks import CharTokenizer, Tokenizer, load_tokenizer
from areal_q.tasks.base import Message

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]
ASKED: Message = {"role": "user", "content": "2+2?"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "c12345678",
            "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
        }
    ],
}
RESULT: Message = {"role": "tool", "name": "add", "tool_call_id": "c12345678", "content": "4"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
THINKS: list[Message] = [
    *TALK[1:2],
    {"role": "assistant", "content": "Hello!", "reasoning_content": "greet"},
    ASKED,
    {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
]
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
REAL: list[tuple[str, list[Message], list[str]]] = [
    ("SmolLM2-135M-Instruct", TALK, ["Hello!<|im_end|>", "4<|im_end|>"]),
    ("tokenizers/llama3_1", TALK, ["Hello!<|eot_id|>", "4<|eot_id|>"]),
    ("tokenizers/gemma3", TALK, ["Hello!<end_of_turn>", "4<end_of_turn>"]),
    ("tokenizers/deepseek_v3", TALK, ["Hello!<｜end▁of▁sentence｜>", "4<｜end▁of▁sentence｜>"]),
    ("tokenizers/qwen3", TALK, ["Hello!<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
    (
        "tokenizers/qwen3",
        THINKS,
        ["Hello!<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"],
    ),
    (
        "tokenizers/qwen3",
        [ASKED, CALL, RESULT, {"role": "assistant", "content": "It is 4."}],
        [QWEN_CALL, "<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
]
"""A public model's tokenizer, a conversation, and by hand what its assistant wrote"""


def learnt(tokenizer: Tokenizer, messages: list[Message], tools: Any = ()) -> list[str]:
    """Returns the texts of the neighbouring tokens that are learnt."""
    ids, mask = tokenizer.encode_transcript(messages, tools)
    assert len(ids) == len(mask) and mask[-1]
    parts: list[list[int]] = []
    for place, (id, own) in enumerate(zip(ids, mask, strict=True)):
        if own and not (place and mask[place - 1]):
            parts.append([])
        if own:
            parts[-1].append(id)
    return [tokenizer.decode(part) for part in parts]


@cache
def real(name: str) -> tuple[Tokenizer, Any]:
    path = ROOT / "models" / name
    if not path.is_dir():
        pytest.skip(f"no models/{name}: make {'tokenizers' if '/' in name else 'real-model'}")
    return load_tokenizer(path, Chat()), AutoTokenizer.from_pretrained(path)


def made(path: Path, template: str, **chat: Any) -> Tokenizer:
    byte_tokenizer(template=template).save_pretrained(path)
    return load_tokenizer(path, Chat(**chat))


@pytest.mark.timeout(60)  # loading a tokenizer of 262,144 tokens takes seconds
@pytest.mark.parametrize(("name", "messages", "parts"), REAL)
def test_public_templates_mark_what_the_table_says(
    name: str, messages: list[Message], parts: list[str]
) -> None:
    ours, theirs = real(name)
    tools = [TOOL] if CALL in messages else []
    assert learnt(ours, messages, tools) == parts
    ids, _ = ours.encode_transcript(messages, tools)
    whole = theirs.apply_chat_template(
        messages, tools=tools or None, tokenize=True, return_dict=False
    )
    assert whole[: len(ids)] == ids, "what follows the last reply is not learnt from"


def test_a_reply_that_names_control_tokens_ends_where_it_ends(tmp_path: Path) -> None:
    says = "<|im_end|> ends a turn"
    tokenizer = made(tmp_path, CHATML)
    talk = [ASKED, {"role": "assistant", "content": says}, ASKED, TALK[-1]]
    assert learnt(tokenizer, talk) == [f"{says}<|im_end|>", "4<|im_end|>"]
    ids, mask = tokenizer.encode_transcript(talk)
    assert sum(id == tokenizer.eos_id for id in ids) == 4, "one for each message"
    assert sum(mask) == len(says) + len("4") + 2


LAST = "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}"
END = "{{m['content'] + '<|im_end|>\n'}}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{'<|im_start|>assistant\n<think>\n'}}{% endif %}"
TEMPLATES = {
    "a thought begins every prompt for a reply": (LAST + END + ASKS, ["Hello!", "4"]),
    "the last reply alone has its thought": (
        LAST + "{% if loop.last and m.role == 'assistant' %}<think>\n{% endif %}" + END + ASKS,
        ["Hello!", "4"],
    ),
    "the system's message comes last of all": (
        "{% for m in messages[1:] %}{{'<|im_start|>' + m['role'] + '\n'}}" + END
        # It moves down as the conversation goes on, so that no prompt is a beginning of the whole.
        + "{{messages[0].content}}<|im_end|>{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_odd_templates_are_marked_or_refused(tmp_path: Path, name: str) -> None:
    template, parts = TEMPLATES[name]
    tokenizer = made(tmp_path, template)
    if parts is None:
        with pytest.raises(TaskError, match="message 3: the chat template writes what comes"):
            tokenizer.encode_transcript(TALK)
    else:
        assert learnt(tokenizer, TALK) == [f"{part}<|im_end|>" for part in parts]


def test_the_settings_system_message_is_context(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, CHATML, system="Be brief.")
    assert tokenizer.encode_transcript(TALK[1:]) == tokenizer.encode_transcript(TALK)


def test_what_cannot_be_learnt_is_refused(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, CHATML)
    with pytest.raises(TaskError, match="no message of the assistant"):
        tokenizer.encode_transcript(TALK[:2])
    with pytest.raises(TaskError, match="leaves out `tools`"):
        tokenizer.encode_transcript(TALK, [TOOL])
    with pytest.raises(TaskError, match="needs a chat template"):
        load_tokenizer(tmp_path).encode_transcript(TALK)


def test_without_roles_contents_follow_each_other() -> None:
    ids, mask = CharTokenizer().encode_transcript(
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    )
    assert (ids, mask) == ([*CharTokenizer().encode("1+1=2"), 1], [False] * 4 + [True] * 2)
