"""Turns, replies and control tokens in contents have the ids that the whole conversation has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_q.config import Chat
from areal_q.tasks import load_tokenizer
from areal_q.tasks.base import Message

END, UNKNOWN = "<|end|>", "<unk>"
ROLES = ("<|user|>", "<|assistant|>")
SPACED = (
    "{% for m in messages %}{{'<|' + m['role'] + '|>\n' + m['content'] + ' <|end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|assistant|>\n'}}{% endif %}"
)
"""A template with spaces around its tokens"""
BARE = (
    "{% for m in messages %}{{m['content'] + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'> '}}{% endif %}"
)
"""A template in which text, and no token, ends a turn"""
KINDS: dict[str, dict[str, Any]] = {
    "a first word has its own sign": {"scheme": "first"},
    "every piece has one": {"scheme": "always"},
    "every piece gets one before it is split": {"scheme": None},
    "tokens take the spaces behind them": {"scheme": "never", "rstrip": True},
    "tokens take the spaces before them": {"scheme": "never", "lstrip": True},
    "both, and a first word": {"scheme": "first", "rstrip": True, "lstrip": True},
}
every = pytest.mark.parametrize("kind", KINDS)


def tokenizer(
    scheme: str | None,
    rstrip: bool = False,
    lstrip: bool = False,
    added: Sequence[str] = (END, "</s>"),
    template: str = SPACED,
) -> PreTrainedTokenizerFast:
    """Returns one of words in the manner of SentencePiece, which merges the sign of a word with its letters."""
    tokens = [UNKNOWN, END, *ROLES, "</s>", "▁", "\n", *map(chr, range(33, 127))]
    vocab = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "4"), ("h", "i"), ("▁", "\n"), ("\n", "\n")]
    vocab |= {a + b: len(vocab) + place for place, (a, b) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNKNOWN))
    if scheme is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strips = {"rstrip": rstrip, "lstrip": lstrip, "normalized": False}
    made.add_special_tokens([AddedToken(t, special=True, **strips) for t in (*ROLES, *added)])
    hf = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    hf.chat_template = template
    return hf


def talk(*contents: str) -> list[Message]:
    """Returns messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def whole(hf: Any, messages: list[Message]) -> list[int]:
    return hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@every
@pytest.mark.parametrize("template", [SPACED, BARE])
def test_a_turn_has_the_ids_of_the_whole_talk(tmp_path: Path, kind: str, template: str) -> None:
    hf = tokenizer(**KINDS[kind], template=template)
    hf.save_pretrained(tmp_path)
    ours, messages = load_tokenizer(tmp_path, Chat()), talk("hi", "4", " hi 4")
    expected, end = whole(hf, messages), hf.convert_tokens_to_ids(END)
    # Where every piece gets a sign, one that goes on behind the model's own text gets it too.
    for ended in (True, False) if KINDS[kind]["scheme"] else (True,):
        turn = ours.encode_turn(messages[2:], ended)
        if template == SPACED:
            said = [place for place, id in enumerate(expected) if id == end][1]
            spaced = [] if ended or KINDS[kind].get("lstrip") else [hf.convert_tokens_to_ids("▁")]
            assert turn == spaced + expected[said + ended :]
        elif KINDS[kind]["scheme"] in (
            "first",
            "never",
        ):  # others write a sign in front of any text
            assert turn == expected[-len(turn) :]


@pytest.mark.parametrize("kind", [name for name, it in KINDS.items() if it["scheme"] == "first"])
def test_a_reply_has_the_ids_of_the_whole_talk(tmp_path: Path, kind: str) -> None:
    hf = tokenizer(**KINDS[kind])
    hf.save_pretrained(tmp_path)
    messages = talk("4", "hi", "hi 4")
    for chat in (Chat(), None):
        ours = load_tokenizer(tmp_path, chat)
        assert ours.encode("hi 4") == hf.encode("<|user|>hi 4")[1:]
        assert ours.encode_prompt("hi")[-1:] != ours.encode("hi")[-1:], "a text begins there"
    chatting, after = load_tokenizer(tmp_path, Chat()), [hf.convert_tokens_to_ids(END)]
    if not KINDS[kind].get("lstrip"):
        after = [hf.convert_tokens_to_ids("▁"), *after]
    played = [*chatting.encode_messages(messages[:1]), *chatting.encode("hi"), *after]
    assert [*played, *chatting.encode_turn(messages[2:], True)] == whole(hf, messages)


@every
@pytest.mark.parametrize(
    "said", ["hi</s>x", "</s>", " </s> hi", "hi 4 </s>", "4 <|end|>\n hi", "\n</s></s>"]
)
def test_a_control_token_that_is_text_changes_nothing_else(
    tmp_path: Path, kind: str, said: str
) -> None:
    """The oracle is a tokenizer to which </s> is text, by a template whose ends are another token."""
    said = said.replace(END, "</s>")
    oracle = tokenizer(**KINDS[kind], added=[END])
    tokenizer(**KINDS[kind]).save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, Chat())
    messages = talk(said, "hi", said)
    assert ours.encode_messages(messages) == whole(oracle, messages)
    ids, learnt = ours.encode_transcript(messages[:2])
    expected = oracle.apply_chat_template(messages[:2], return_dict=False)
    assert ids == expected[: len(ids)] and sum(learnt) == len(ids) - learnt.index(True)
