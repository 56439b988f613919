"""Tokenizers of public models beside transformers: prompts, turns, ends, control tokens in data, streams."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.saved_tokenizers import save_theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from areal_q.config import Chat
from areal_q.errors import TaskError
from areal_q.tasks import HFTokenizer, load_tokenizer
from areal_q.tasks.base import Message
from rollout.engines.stop_conditions import TextStream

pytestmark = pytest.mark.timeout(60)  # loading a tokenizer of 262,144 tokens takes seconds
MODELS = ROOT / "models"
ENDS = {
    "tokenizers/qwen3": "<|im_end|>",
    "tokenizers/llama3_1": "<|eot_id|>",
    "tokenizers/gemma3": "<end_of_turn>",
    "tokenizers/deepseek_v3": "<｜end▁of▁sentence｜>",
    "SmolLM2-135M-Instruct": "<|im_end|>",
}
"""What an assistant's message ends with in the model's own template"""
PLAIN = "tokenizers/gptoss"
"""One without a template"""
PARTS = [
    "user",
    "assistant\n",
    "<",
    "|",
    "im_end",
    " ",
    "\n",
    "\n\n",
    "  ",
    "é",
    "日本",
    "😀",
    "2+2=",
    "{{",
    "\t",
]


def directory(name: str) -> Any:
    path = MODELS / name
    if not path.is_dir():
        pytest.skip(f"no models/{name}: make {'tokenizers' if '/' in name else 'real-model'}")
    return path


@cache
def ours(name: str) -> HFTokenizer:
    tokenizer = load_tokenizer(directory(name), None if name == PLAIN else Chat())
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


@cache
def theirs(name: str) -> Any:
    return AutoTokenizer.from_pretrained(directory(name))


def by_transformers(name: str, messages: list[Message], **more: Any) -> list[int]:
    return theirs(name).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **more
    )


every = pytest.mark.parametrize("name", ENDS)
examples = settings(max_examples=10, deadline=None)
contents = st.text(min_size=1) | st.lists(st.sampled_from(PARTS), min_size=1).map("".join)


@every
@examples
@given(first=contents, reply=contents, then=contents)
def test_prompts_are_those_of_transformers(name: str, first: str, reply: str, then: str) -> None:
    user, assistant = {"role": "user", "content": first}, {"role": "assistant", "content": reply}
    more = {"role": "user", "content": then}
    assert ours(name).encode_prompt(first) == by_transformers(name, [user])
    for messages in ([user, assistant, more], [{"role": "system", "content": reply}, user]):
        assert ours(name).encode_messages(messages) == by_transformers(name, messages)


@every
@examples
@given(data=st.data())
def test_control_tokens_in_contents_are_text(name: str, data: st.DataObject) -> None:
    control = [ENDS[name], *theirs(name).all_special_tokens[:5]]
    parts = st.lists(st.sampled_from([*PARTS, *control]), min_size=1).map("".join)
    messages = [{"role": role, "content": "a" + data.draw(parts)} for role in ("system", "user")]
    ids = ours(name).encode_messages(messages)
    rendered = theirs(name).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert ours(name).decode(ids) == rendered
    bare = ours(name).encode_messages([{**m, "content": "a"} for m in messages])
    special = theirs(name).all_special_ids
    assert [i for i in ids if i in special] == [i for i in bare if i in special]


def test_control_tokens_can_be_left_as_they_are() -> None:
    name = "SmolLM2-135M-Instruct"
    open_ = load_tokenizer(directory(name), Chat(split_special=False))
    prompt = f"what does {ENDS[name]} mean?"
    user = [{"role": "user", "content": prompt}]
    assert open_.encode_prompt(prompt) == by_transformers(name, user)
    assert open_.encode_prompt(prompt) != ours(name).encode_prompt(prompt)


@every
@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_goes_on_as_the_template_does(name: str, ended: bool) -> None:
    tokenizer = ours(name)
    asked = [{"role": "user", "content": "2+2="}]
    more = [{"role": "user", "content": "and 3+3? 😀"}]
    reply = [*tokenizer.encode("4, as ever."), *[tokenizer.eos_id] * ended]
    played = [*tokenizer.encode_messages(asked), *reply, *tokenizer.encode_turn(more, ended)]
    said = {"role": "assistant", "content": "4, as ever."}
    assert played == by_transformers(name, [*asked, said, *more])


@every
def test_the_template_s_end_of_a_turn_is_a_stop(name: str) -> None:
    tokenizer = ours(name)
    assert tokenizer.decode([tokenizer.eos_id]) == ENDS[name]
    assert "chat template" in tokenizer.stops[tokenizer.eos_id].sources
    assert tokenizer.prefill == ""


@pytest.mark.parametrize("name", [*ENDS, PLAIN])
def test_a_tokenizer_saves_what_transformers_would(name: str, tmp_path: Path) -> None:
    read, saved, expected = (tmp_path / part for part in ("read", "saved", "expected"))
    for new in (read, saved):
        new.mkdir()
    for file in directory(name).iterdir():
        (read / file.name).symlink_to(file)
    if not (read / "config.json").exists():  # which a model's directory has
        (read / "config.json").write_text('{"model_type": "qwen3"}')
    load_tokenizer(read).save(str(saved))
    save_theirs(read, expected)
    assert sorted(f.name for f in saved.iterdir()) == sorted(f.name for f in expected.iterdir())
    for file in expected.iterdir():
        assert (saved / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", [*ENDS, PLAIN])
@examples
@given(text=contents)
def test_a_stream_of_tokens_is_the_whole_text(name: str, text: str) -> None:
    tokenizer = ours(name)
    ids = tokenizer.encode(text + " 😀日本語 é")
    stream = TextStream(tokenizer.decode)
    assert "".join(stream.add(i)[0] for i in ids) == tokenizer.decode(ids)


def test_a_template_s_refusal_is_told_in_its_own_words() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        TaskError, match="refuses these messages: Conversation roles must alternate"
    ):
        ours("tokenizers/gemma3").encode_messages(twice)


def test_a_template_s_variable_is_a_setting() -> None:
    name = "tokenizers/qwen3"
    quiet = load_tokenizer(directory(name), Chat(template_args={"enable_thinking": False}))
    user = [{"role": "user", "content": "2+2="}]
    assert quiet.encode_prompt("2+2=") == by_transformers(name, user, enable_thinking=False)
    assert quiet.encode_prompt("2+2=") != ours(name).encode_prompt("2+2=")
    assert quiet.prefill == ""


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
QWEN = "tokenizers/qwen3"


def calling(arguments: Any, *, content: str = "") -> Message:
    call = {"id": "call00001", "type": "function"}
    function = {"name": "look_up", "arguments": arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{**call, "function": function}]}


@examples
@given(word=contents, said=st.just("") | contents)
def test_tools_and_their_calls_are_rendered_by_transformers(word: str, said: str) -> None:
    talk = [
        {"role": "user", "content": "what is this?"},
        calling({"word": word, "n": 2}, content=said),
        {"role": "tool", "content": word, "tool_call_id": "call00001"},
    ]
    found = ours(QWEN).encode_messages(talk, tools=[TOOL])
    assert found == by_transformers(QWEN, talk, tools=[TOOL])


def test_control_tokens_of_a_call_are_text() -> None:
    """Those of its arguments, of its tool's result and of a tool's description."""
    end = ENDS[QWEN]
    described = {"type": "function", "function": {**TOOL["function"], "description": f"a{end}"}}
    talk = [
        {"role": "user", "content": "?"},
        calling({"word": [end, {"x": f"a{end}"}]}),
        {"role": "tool", "content": f"{end}\n"},
    ]
    ids = ours(QWEN).encode_messages(talk, tools=[described])
    rendered = theirs(QWEN).apply_chat_template(
        talk, tools=[described], add_generation_prompt=True, tokenize=False
    )
    assert ours(QWEN).decode(ids) == rendered
    assert rendered.count(end) == 4 + ids.count(ours(QWEN).eos_id)


def test_a_result_does_not_end_itself() -> None:
    """The marks around it are tokens, though no special ones."""
    marks = [theirs(QWEN).convert_tokens_to_ids(f"<{end}tool_response>") for end in ("", "/")]
    talk = [
        {"role": "user", "content": "?"},
        calling({"word": "a"}),
        {"role": "tool", "content": "a\n</tool_response>\n<tool_response>\nb"},
    ]
    ids = ours(QWEN).encode_messages(talk)
    rendered = theirs(QWEN).apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert ours(QWEN).decode(ids) == rendered
    assert [ids.count(mark) for mark in marks] == [1, 1]
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'  # by the model, as text
    ids, _ = ours(QWEN).encode_transcript([talk[0], {"role": "assistant", "content": written}], [])
    marks = [theirs(QWEN).convert_tokens_to_ids(f"<{end}tool_call>") for end in ("", "/")]
    assert [ids.count(mark) for mark in marks] == [1, 1]


@pytest.mark.parametrize("ended", [True, False])
def test_a_turn_goes_on_after_a_call(ended: bool) -> None:
    """The oracle is the template on the whole conversation; a model draws a call as the template writes it."""
    tokenizer = ours(QWEN)
    asked = [{"role": "user", "content": "what is this?"}]
    said = calling({"word": "é"})
    drawn = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call>'
    more = [
        {"role": "tool", "content": "a word", "tool_call_id": "call00001"},
        {"role": "tool", "content": "another", "tool_call_id": "call00002"},
    ]
    played = [*tokenizer.encode_messages(asked, tools=[TOOL]), *tokenizer.encode(drawn)]
    played += [tokenizer.eos_id] * ended
    played += tokenizer.encode_turn(more, ended, calls=said["tool_calls"])
    assert played == by_transformers(QWEN, [*asked, said, *more], tools=[TOOL])


@pytest.mark.parametrize("name", ["tokenizers/llama3_1", "tokenizers/deepseek_v3"])
def test_a_template_without_tools_refuses_them(name: str) -> None:
    user = {"role": "user", "content": "?"}
    with pytest.raises(TaskError, match="leaves out `tools`"):
        ours(name).encode_messages([user], tools=[TOOL])
    with pytest.raises(TaskError, match="leaves out `tool_calls`"):
        ours(name).encode_messages([user, calling({}), user])
