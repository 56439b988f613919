"""Stops of several tokens and of text, beside looking for them in all that there is after every token."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from areal_q.config import Sampling
from rollout.engines.stop_conditions import (
    Stopper,
    TextStream,
    cut_at_stop,
    held_back,
    stopper,
)

SAYING = [
    "naïve café: 12 + 34 = 46\n\nObservation: ¡olé! 数式は正しい",
    "the answer is\nfinal answer: 46",
]


@cache
def tokenizer() -> Tokenizer:
    """Bytes, and pairs of them that often stand together: tokens of several characters and of parts of one."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SAYING * 5, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    return made


@cache
def metaspace() -> Tokenizer:
    """One whose decoder drops the space at the beginning of a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        SAYING * 5, trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"])
    )
    return made


def whole(decode, ids) -> str:
    return decode(ids).rstrip("�")


def first_end(decode, ids, stops) -> int | None:
    """How many tokens there are when one of the stops is first complete, by looking at everything."""
    for end in range(1, len(ids) + 1):
        if any(
            s in whole(decode, ids[:end])
            if isinstance(s, str)
            else tuple(ids[:end])[-len(s) :] == s
            for s in stops
        ):
            return end
    return None


IDS = st.lists(st.integers(0, 299), min_size=1, max_size=30)


@given(IDS, st.data())
def test_a_stop_is_found_with_the_very_token_that_completes_it(ids, data):
    decode = tokenizer().decode
    text = whole(decode, ids)
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    piece = text[at : at + data.draw(st.integers(1, 6))] or "?"
    start = data.draw(st.integers(0, len(ids) - 1))
    stops = (piece, tuple(ids[start : start + 3]), "never, ever")
    watch = Stopper(Sampling(stop=stops), decode)
    found = next((n for n, token in enumerate(ids, 1) if watch(token)), None)
    if "�" not in piece:  # bytes that are no character; how many of them are shown may change
        assert found == first_end(decode, ids, stops)
    assert watch.stopped == (found is not None)


@pytest.mark.parametrize("make", [tokenizer, metaspace])
@pytest.mark.parametrize("said", SAYING)
def test_the_text_of_a_stream_is_that_of_the_whole(make, said):
    ids = make().encode(said).ids
    stream, text = TextStream(make().decode), ""
    for end, token in enumerate(ids, 1):
        new, pending = stream.add(token)
        text += new
        assert text + pending == whole(make().decode, ids[:end])


def test_a_stop_inside_of_a_token_ends_after_that_token():
    words = ["ab", "cXYd", "e", "", "XY"]
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    watch = Stopper(Sampling(stop=("XY",)), decode)
    assert [watch(0), watch(2), watch(1)] == [False, False, True]
    across = Stopper(Sampling(stop=("bcX",)), decode)
    assert [across(0), across(3), across(1)] == [False, False, True]


def test_earlier_tokens_count_for_a_stop_but_do_not_stop():
    watch = Stopper(Sampling(stop=((1, 2, 3), (7,))), None, drawn=[7, 1, 2])
    assert not watch.stopped and watch(3)
    assert stopper(Sampling(), None) is None


def test_text_is_cut_at_a_stop_and_held_back_before_one():
    stops = ("\n\n", "Obs:")
    assert cut_at_stop("46 Obs:\n\n", stops) == "46 "
    assert cut_at_stop("46", stops) == "46"
    assert held_back("46 Ob", stops) == 2
    assert held_back("46\n", stops) == 1
    assert held_back("46", stops) == 0
