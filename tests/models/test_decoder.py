"""The packed decoder: against sequences run one by one, and against plain definitions."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.strategies import grouped
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.models import Decoder, DecoderConfig, PackedLayout, init_weights, rope_tables
from areal_q.models.layers.packed_attention import packed_attention
from areal_q.models.layers.rope import apply_rope
from areal_q.models.layers.token_share import TokenShare
from areal_q.models.packed_layout import Segment

SMALL = DecoderConfig(
    family="qwen3",
    vocab_size=23,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=24,
    max_positions=64,
)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def small_model() -> Decoder:
    model = Decoder(SMALL)
    init_weights(model, 0)
    return model


# The layout


@given(lengths=LENGTHS)
def test_layout_places_every_token_once(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths)
    assert layout.positions.tolist() == [i for n in lengths for i in range(n)]
    rows = torch.cat([b.rows.flatten() for b in layout.buckets])
    assert rows[layout.unpad].tolist() == list(range(sum(lengths)))


@given(lengths=LENGTHS)
def test_layout_pads_a_sequence_by_at_most_a_third(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths)
    of_token = [i for i, n in enumerate(lengths) for _ in range(n)]
    for bucket in layout.buckets:
        for row in bucket.rows.tolist():
            assert len({of_token[t] for t in row}) == 1
            assert lengths[of_token[row[0]]] >= 0.75 * len(row)


GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    min_size=1,
    max_size=5,
)


@given(groups=GROUPS)
def test_shared_prompt_gives_the_states_of_separate_sequences(
    groups: list[tuple[int, list[int]]],
) -> None:
    model = small_model()
    generator = torch.Generator().manual_seed(0)
    shared: list[torch.Tensor] = []
    apart: list[torch.Tensor] = []
    for prompt, responses in groups:
        first = torch.randint(0, model.config.vocab_size, (prompt,), generator=generator)
        shared.append(first)
        for length in responses:
            own = torch.randint(0, model.config.vocab_size, (length,), generator=generator)
            shared.append(own)
            apart.append(torch.cat((first, own)))
    layout = grouped(groups)
    assert layout.lengths == tuple(map(len, apart))
    together = model(torch.cat(shared), layout)
    one_by_one = [model(ids, PackedLayout.of([len(ids)])) for ids in apart]
    start = number = 0
    for prompt, responses in groups:
        torch.testing.assert_close(
            together[start : start + prompt], one_by_one[number][:prompt], atol=5e-5, rtol=0
        )
        start += prompt
        for length in responses:
            torch.testing.assert_close(
                together[start : start + length], one_by_one[number][prompt:], atol=5e-5, rtol=0
            )
            start, number = start + length, number + 1


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_layout_refuses_empty_sequences(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.of(lengths)


# RoPE


def test_rope_rotates_channel_pairs_by_position_times_frequency() -> None:
    cos, sin = rope_tables(SMALL)
    assert cos.shape == sin.shape == (SMALL.max_positions, SMALL.head_dim)
    x = torch.randn(SMALL.max_positions, 3, SMALL.head_dim, dtype=torch.float64)
    half = SMALL.head_dim // 2
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1))
    angle = torch.outer(torch.arange(64.0), torch.tensor(SMALL.inverse_frequencies())).double()
    turned = torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)[:, None])
    expected = torch.cat((turned[..., 0], turned[..., 1]), -1)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected, atol=5e-5, rtol=0)


def test_rope_makes_scores_depend_on_distance_only() -> None:
    cos, sin = rope_tables(SMALL)
    q, k = torch.randn(2, 1, SMALL.head_dim)
    scores = [
        (apply_rope(q, cos[i], sin[i]) * apply_rope(k, cos[i - 5], sin[i - 5])).sum()
        for i in (5, 20, 63)
    ]
    torch.testing.assert_close(scores[0], scores[1], atol=5e-5, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=5e-5, rtol=0)


# Attention and the whole model


@settings(deadline=None, max_examples=25)
@given(lengths=LENGTHS, heads=st.sampled_from([(4, 4), (4, 2), (4, 1)]))
def test_packed_attention_equals_softmax_of_each_sequence(
    lengths: list[int], heads: tuple[int, int]
) -> None:
    total, (queries, keys) = sum(lengths), heads
    q = torch.randn(total, queries, 8)
    k, v = torch.randn(2, total, keys, 8)
    out = packed_attention(q, k, v, PackedLayout.of(lengths))
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        wide_k, wide_v = (x[part].repeat_interleave(queries // keys, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[part], wide_k) / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), wide_v)
        torch.testing.assert_close(out[part], expected, atol=5e-5, rtol=0)
        start += n


LONG = {
    "a window": ([Segment(700)], 90),
    "a window of three tokens": ([Segment(700)], 3),
    "a branch": ([Segment(400), Segment(310, 0, 390)], None),
    "a branch, a window": ([Segment(400), Segment(310, 0, 390)], 200),
}


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("kind", LONG)
def test_long_sequences_have_no_mask_of_their_square(
    kind: str, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And equal the softmax over what each token sees, and a sink if there is one, gradient included."""
    segments, window = LONG[kind]
    monkeypatch.setattr("areal_q.models.layers.packed_attention.MASK", 64 * 700)
    layout = PackedLayout.of_forest(segments)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(layout.positions), 2, 4, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, requires_grad=True) if sunk else None
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = packed_attention(q, k, v, layout, window, sinks=sinks)
    rows = max(bucket.rows.shape[1] - bucket.first for bucket in layout.buckets)
    assert max(kept.values()) < 4 * rows * layout.longest / 2
    assert sum(kept.values()) < 4 * rows * layout.longest
    paths = torch.from_numpy(layout.paths).split(layout.lengths)
    sees = torch.zeros(len(q), len(q), dtype=torch.bool)
    for path in paths:
        for place, token in enumerate(path.tolist()):
            sees[token, path[max(0, place + 1 - (window or place + 1)) : place + 1]] = True
    scores = torch.einsum("qhd,khd->hqk", q, k) / 2
    scores = scores.masked_fill(~sees, -torch.inf)
    learnt, weights = (q, k, v), scores.softmax(-1)
    if sinks is not None:
        sink = sinks.view(2, 1, 1).expand(2, len(q), 1)
        learnt, weights = (*learnt, sinks), torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("hqk,khd->qhd", weights, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((o * slope).sum(), learnt) for o in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


FORESTS = {
    **{kind: LONG[kind] for kind in ("a branch", "a branch, a window")},
    "repeated prompts": ([Segment(9), Segment(3, 0, 7), Segment(12, 0, 7), Segment(4)], None),
    "two tokens": ([Segment(2)], None),
}


@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks_that_have_the_same_head_divide_its_queries(forest: str, ranks: int) -> None:
    """Their outputs are the whole batch's, and all do as much work, but for rounding."""
    segments, window = FORESTS[forest]
    whole = PackedLayout.of_forest(segments)
    total = len(whole.positions)
    q, k, v = torch.randn(3, total, 1, 4)
    expected, found, works = packed_attention(q, k, v, whole, window), torch.zeros(total, 1, 4), []
    for rank in range(ranks):
        own = whole.of_rank(TokenShare(rank, ranks, None, total, heads=1))
        assert own.share is not None
        queries = own.share.queries[rank]
        out = packed_attention(q[queries], k, v, replace(own, share=None), window)
        found.index_add_(0, queries, out)
        works.append(sum(whole.positions[queries].tolist()))
        assert len(queries) <= total // ranks + 2 * len(segments)
    torch.testing.assert_close(found, expected)
    assert max(works) <= sum(works) / ranks + 3 * len(segments) * whole.longest


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_have_the_gradient_of_finite_differences(window: int | None) -> None:
    """In float64, with four heads to two of keys and values."""
    torch.manual_seed(0)
    layout = PackedLayout.of([3, 1, 6])
    shapes = (10, 4, 8), (10, 2, 8), (10, 2, 8), (4,)
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attend(*parts: torch.Tensor) -> torch.Tensor:
        q, k, v, sinks = parts
        return packed_attention(q, k, v, layout, window, 0.3, sinks)

    assert torch.autograd.gradcheck(attend, parts, fast_mode=True)


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [3, 40, 1, 9, 10, 38, 2]])
def test_packed_equals_one_by_one_in_output_and_gradient(lengths: list[int]) -> None:
    model = small_model()
    ids = torch.randint(0, SMALL.vocab_size, (sum(lengths),))
    weights = torch.randn(sum(lengths), SMALL.vocab_size)

    def gradients(logits: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))

    packed = model.logits(model(ids, PackedLayout.of(lengths)))
    singles = torch.cat(
        [model.logits(model(part, PackedLayout.of([len(part)]))) for part in ids.split(lengths)]
    )
    torch.testing.assert_close(packed, singles, atol=5e-5, rtol=0)
    for ours, theirs in zip(gradients(packed), gradients(singles), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_gradients_match_finite_differences() -> None:
    model = small_model().double()
    layout = PackedLayout.of([3, 1, 5])
    ids = torch.randint(0, SMALL.vocab_size, (9,))
    name = "model.layers.0.self_attn.k_proj.weight"

    def loss(weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.func.functional_call(model, {name: weight}, (ids, layout))
        return hidden.square().sin().sum()

    weight = model.get_parameter(name).detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(loss, (weight,), fast_mode=True)


def test_logits_of_chosen_positions_are_rows_of_all_logits() -> None:
    model = small_model()
    hidden = model(torch.arange(12), PackedLayout.of([5, 7]))
    chosen = torch.tensor([3, 4, 11])
    torch.testing.assert_close(model.logits(hidden[chosen]), model.logits(hidden)[chosen])


# Initial weights


def test_initial_weights_depend_on_the_seed_alone() -> None:
    a, b, c = (Decoder(SMALL) for _ in range(3))
    init_weights(a, 1)
    torch.manual_seed(99)
    init_weights(b, 1)
    init_weights(c, 2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.model.embed_tokens.weight, c.model.embed_tokens.weight)


def test_initial_weights_have_the_documented_spread() -> None:
    config = DecoderConfig(
        family="qwen2",
        vocab_size=500,
        width=64,
        layers=8,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=128,
        max_positions=8,
        qkv_bias=True,
    )
    model = Decoder(config)
    init_weights(model, 0)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert p.std().item() == pytest.approx(1 / 32 if residual else 1 / 8, rel=0.1)
        else:
            assert torch.equal(p, torch.full_like(p, 0.0 if name.endswith("bias") else 1.0))
