"""A tokenizer with several chat templates: which one is used, and what is said if none of them can be."""

from pathlib import Path

import pytest
from helpers.chain_models import CHATML, byte_tokenizer
from transformers import AutoTokenizer

from areal_q.config import Chat
from areal_q.errors import ConfigError, TaskError
from areal_q.tasks import HFTokenizer, load_tokenizer
from areal_q.tasks.base import Message
from rollout.reply_formats.table import FORMATS, format_of

ASKED: Message = {"role": "user", "content": "2+2?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
]
CALLED: list[Message] = [
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
]
TOOL_USE = (
    "{% if tools %}{{tools | tojson}}{% endif %}"
    + CHATML.replace(
        "m['content'] + ",
        "m['content']}}{% for c in m['tool_calls'] or [] %}<tool_call>{{c.function | tojson}}{% endfor %}{{",
    )
).replace("<|im_end|>", "</s>")


def made(path: Path, **templates: str) -> HFTokenizer:
    hf = byte_tokenizer(template=None)
    hf.chat_template = templates
    hf.save_pretrained(path)
    tokenizer = load_tokenizer(path, Chat())
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        made(tmp_path, rag=CHATML, tool_use=CHATML)
    line = "only rag, tool_use: name a file with the one to use: task.chat.template_file=FILE"
    assert str(refused.value).endswith(line)
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    chosen = load_tokenizer(tmp_path, Chat(template_file=str(file)))
    assert chosen.decode(chosen.encode_prompt("hi")).startswith("<|im_start|>user\nhi")


UNGUARDED = TOOL_USE.replace(
    "{% if tools %}{{tools | tojson}}{% endif %}",
    "{% for tool in tools %}{{tool | tojson}}{% endfor %}",
)
"""It takes tools for granted, as some do"""


@pytest.mark.parametrize("template", [TOOL_USE, UNGUARDED])
def test_conversations_with_tools_have_their_own_template(tmp_path: Path, template: str) -> None:
    ours = made(tmp_path, default=CHATML, tool_use=template)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ([], [TOOL]):
        messages = [ASKED, *(CALLED if tools else [])]
        asked = hf.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_messages(messages, tools=tools) == asked
    turn = ours.encode_turn(CALLED[1:], ended=False, calls=CALLS)
    assert ours.decode(turn).startswith("</s>\n<|im_start|>tool\n4</s>")
    said: Message = {"role": "assistant", "content": "4"}
    ids, _ = ours.encode_transcript([ASKED, *CALLED, said], [TOOL])
    whole = hf.apply_chat_template([ASKED, *CALLED, said], tools=[TOOL], return_dict=False)
    assert whole[: len(ids)] == ids


def test_the_ends_and_calls_of_both_templates_are_known(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, default=CHATML, tool_use=TOOL_USE)
    assert {stop.token for stop in tokenizer.stops.values()} == {"<|im_end|>", "</s>"}
    assert tokenizer.decode([tokenizer.eos_id]) == "<|im_end|>"
    assert format_of(tokenizer) is FORMATS["hermes"]


def test_one_template_leaves_tools_to_be_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="leaves out `tools`"):
        made(tmp_path, default=CHATML).encode_messages([ASKED], tools=[TOOL])
