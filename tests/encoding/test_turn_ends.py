"""The token that ends an assistant's turn in the template is a stop, whatever the tokenizer's files call it."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chain_models import CHATML, END_OF_TEXT, END_OF_TURN, byte_tokenizer

from areal_q.config import Chat
from areal_q.tasks import HFTokenizer, load_tokenizer

ASKED = {"role": "user", "content": "2+2?"}
CALLED_SPECIAL = {
    "by additional_special_tokens": {"additional_special_tokens": [END_OF_TURN]},
    "by extra_special_tokens": {"extra_special_tokens": [END_OF_TURN]},
    "by nothing": {},
}


def plain_token(path: Path, text: str, settings: dict[str, Any], template: str) -> HFTokenizer:
    """Returns the tokenizer of a model whose tokenizer.json does not call the added token `text` special."""
    hf = byte_tokenizer(eos=END_OF_TEXT, template=template, special=("</answer>",))
    hf.save_pretrained(path)
    for name, change in (("tokenizer", {}), ("tokenizer_config", settings)):
        file = path / f"{name}.json"
        table = json.loads(file.read_text()) | change
        for token in table.get("added_tokens", ()):
            token["special"] &= token["content"] != text
        file.write_text(json.dumps(table))
    made = load_tokenizer(path, Chat())
    assert isinstance(made, HFTokenizer)
    return made


@pytest.mark.parametrize("called", CALLED_SPECIAL)
def test_an_end_that_only_the_template_writes_is_a_stop(tmp_path: Path, called: str) -> None:
    tokenizer = plain_token(tmp_path, END_OF_TURN, CALLED_SPECIAL[called], CHATML)
    end = tokenizer.encode(END_OF_TURN)[0]
    assert tokenizer.eos_id == end and tokenizer.stops[end].sources == ("chat template",)
    assert end in tokenizer.special_ids, "it is no text to a reader"
    turn = tokenizer.decode(tokenizer.encode_turn([ASKED], ended=True))
    assert turn.startswith("\n<|im_start|>user"), "the end is there already"


@pytest.mark.parametrize("called", CALLED_SPECIAL)
def test_a_reply_is_learnt_up_to_that_end(tmp_path: Path, called: str) -> None:
    tokenizer = plain_token(tmp_path, END_OF_TURN, CALLED_SPECIAL[called], CHATML)
    said = {"role": "assistant", "content": "4"}
    ids, learnt = tokenizer.encode_transcript([ASKED, said, ASKED, said])
    own = [id for id, own in zip(ids, learnt, strict=True) if own]
    assert tokenizer.decode(own) == f"4{END_OF_TURN}" * 2
    assert tokenizer.decode(ids).endswith(END_OF_TURN), (
        'the "\\n" behind it is no part of the reply'
    )


def test_that_end_in_a_content_is_text(tmp_path: Path) -> None:
    tokenizer = plain_token(tmp_path, END_OF_TURN, {}, CHATML)
    ids = tokenizer.encode_prompt(f"what is {END_OF_TURN}?")
    assert ids.count(tokenizer.eos_id) == 1


def test_a_token_before_the_end_is_no_stop(tmp_path: Path) -> None:
    """A reply would lack the end that its own template writes."""
    template = CHATML.replace("'<|im_end|>\n'", "'</answer><|im_end|>\n'")
    tokenizer = plain_token(tmp_path, "</answer>", {}, template)
    assert tokenizer.encode("</answer>")[0] not in tokenizer.stops
