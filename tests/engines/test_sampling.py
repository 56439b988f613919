"""Drawing against its definition: a sort of each row in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from areal_q.config import Sampling
from rollout.engines.reference.ops import Ops, TorchOps
from rollout.engines.reference.ops_numba import FusedOps
from rollout.engines.reference.sampling import Knobs, mix64, random_uniform, seed_keys

OPS = [pytest.param(TorchOps(), id="torch"), pytest.param(FusedOps(), id="fused")]
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=0.6),
    Sampling(top_k=5),
    Sampling(top_p=0.9),
    Sampling(min_p=0.15),
    Sampling(top_k=1),
    Sampling(top_p=1e-6),
    Sampling(top_k=1500, temperature=3.0),
    Sampling(top_k=10**6, top_p=0.999, temperature=20.0),
    Sampling(top_k=40, top_p=0.8, min_p=0.02, temperature=1.7),
    Sampling(top_k=3, top_p=0.5, temperature=0.0),
]


def log_distribution(row: Tensor, sampling: Sampling) -> Tensor:
    """The log-probs, float64 [V], of the distribution that sampling.draw defines."""
    if sampling.temperature == 0:
        only = torch.full((len(row),), -torch.inf, dtype=torch.float64)
        return only.index_fill(0, row.argmax(), 0.0)
    knobs = Knobs.of([sampling])
    scaled, order = (row.double() / knobs.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scaled[sampling.top_k :] = -torch.inf
    probs = scaled.softmax(-1)
    cut = probs < knobs.min_p * probs[0]
    if sampling.top_p < 1:
        cut[1:] |= probs.cumsum(-1)[:-1] >= knobs.top_p
    kept = scaled.masked_fill(cut, -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter_(0, order, kept)


def uniform(rows: int) -> Tensor:
    return random_uniform(seed_keys(list(range(rows))), torch.full((rows,), 5))


def draw(ops: Ops, logits: Tensor, sampling: list[Sampling], u: Tensor) -> tuple[Tensor, Tensor]:
    return ops.draw(logits, Knobs.of(sampling), u)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("vocab", [1, 3, 300, 2000, 40_000])
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "equal", "masked", "one left"])
def test_each_row_is_drawn_from_its_own_distribution(ops, vocab, kind):
    torch.manual_seed(vocab)
    logits = torch.randn(4 * len(SETTINGS), vocab)
    if kind == "peaked":
        logits = 3 * logits - 5 * torch.arange(vocab).log1p() + 30
    elif kind == "tied":
        logits = (2 * logits).round()
    elif kind == "equal":
        logits = torch.full_like(logits, -2.5)
    elif kind == "masked":
        logits[torch.rand_like(logits) < 0.5] = -torch.inf
        logits[:, vocab // 2] = 1.0
    elif kind == "one left":
        logits = torch.full_like(logits, -torch.inf)
        logits[:, vocab // 2] = 1.0
    sampling, u = 4 * SETTINGS, uniform(len(logits))
    tokens, logprobs = draw(ops, logits, sampling, u)
    for row, asked, number, token, logprob in zip(
        logits, sampling, u, tokens, logprobs, strict=True
    ):
        want = log_distribution(row, asked)
        torch.testing.assert_close(logprob.double(), want[token], rtol=1e-6, atol=1e-6)
        below = want[:token].exp().sum()
        assert below - 1e-6 <= number <= below + want[token].exp() + 1e-6


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("sampling", SETTINGS)
def test_frequencies_of_drawn_tokens_match_their_probabilities(ops, sampling):
    torch.manual_seed(0)
    rows, vocab = 20_000, 12
    logits = torch.randn(vocab).mul_(1.5).expand(rows, vocab).contiguous()
    tokens, logprobs = draw(ops, logits, [sampling] * rows, uniform(rows))
    distribution = log_distribution(logits[0], sampling)
    p = distribution.exp()
    torch.testing.assert_close(logprobs.double(), distribution[tokens], rtol=0, atol=1e-6)
    counts = torch.bincount(tokens, minlength=vocab)
    assert (counts[p == 0] == 0).all()
    kept = p > 0
    chi2 = ((counts - rows * p)[kept] ** 2 / (rows * p[kept])).sum().item()
    degrees = int(kept.sum()) - 1
    assert chi2 <= degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("ops", OPS)
def test_truncation_keeps_what_it_should_by_hand(ops):
    def support(probs=(0.5, 0.3, 0.15, 0.05), **sampling):
        u = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]
        logits = torch.tensor(probs).log().expand(len(u), -1).contiguous()
        tokens, logprobs = draw(ops, logits, [Sampling(**sampling)] * len(u), u)
        found = [0.0] * len(probs)
        for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            found[token] = math.exp(logprob)
        return found

    assert support() == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert support(top_k=1) == [1, 0, 0, 0]
    assert support(top_p=0.4) == [1, 0, 0, 0]
    assert support(top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0])
    assert support(top_k=3, top_p=0.9) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert support(min_p=0.31) == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0, 0])
    assert support(min_p=0.29) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert support(min_p=0.29, top_p=0.6) == pytest.approx([0.625, 0.375, 0, 0])
    assert support(min_p=0.99) == [1, 0, 0, 0]
    # of the scaled probabilities: 0.15 / 0.5 is 0.09 at temperature 0.5
    assert support(min_p=0.1, temperature=0.5) == pytest.approx([0.25 / 0.34, 0.09 / 0.34, 0, 0])
    assert support(top_k=9) == pytest.approx([0.5, 0.3, 0.15, 0.05])
    assert support(temperature=0.0) == [1, 0, 0, 0]
    assert support(temperature=0.5) == pytest.approx(
        [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]
    )
    # of equal tokens the first stay, and those before and after larger ones alike
    assert support((0.2, 0.4, 0.2, 0.2), top_k=3) == pytest.approx([0.25, 0.5, 0.25, 0])
    assert support((0.2, 0.4, 0.2, 0.2), top_p=0.7) == pytest.approx([0.25, 0.5, 0.25, 0])
    assert support((0.25,) * 4, top_p=0.5) == pytest.approx([0.5, 0.5, 0, 0])
    assert support((0.2, 0.4, 0.4), temperature=0.0) == [0, 1, 0]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("vocab", [31, 5000])
def test_a_row_is_drawn_alike_alone_and_among_others(ops, vocab):
    """Bit for bit, in any order, and on any number of threads."""
    torch.manual_seed(1)
    logits, sampling = 2 * torch.randn(len(SETTINGS), vocab), SETTINGS
    u, threads = uniform(len(sampling)), torch.get_num_threads()
    tokens, logprobs = draw(ops, logits, sampling, u)
    for r, asked in enumerate(sampling):
        alone = draw(ops, logits[r : r + 1], [asked], u[r : r + 1])
        assert torch.equal(alone[0], tokens[r : r + 1])
        assert torch.equal(alone[1], logprobs[r : r + 1])
    try:
        torch.set_num_threads(threads % 2 + 1)
        turned = draw(ops, logits.flip(0), sampling[::-1], u.flip(0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(turned[0].flip(0), tokens) and torch.equal(turned[1].flip(0), logprobs)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_row_shows_in_its_log_prob_alone(ops, sampling, bad):
    logits = torch.randn(3, 300)
    logits[1, 200:] = bad
    if bad < 0:
        logits[1] = bad  # with a single finite logit all is well
    tokens, logprobs = draw(ops, logits, [sampling] * 3, uniform(3))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("ops", OPS)
@given(
    st.lists(st.floats(-200, 200, width=32) | st.just(-math.inf), min_size=2, max_size=20).filter(
        lambda x: max(x) > -math.inf
    ),
    st.sampled_from([0.0, 1e-12, 0.25, 0.5, 1 - 2**-24, 1 - 2**-53]),
)
def test_a_token_of_probability_zero_is_never_drawn(ops, logits, u):
    row = torch.tensor([logits])
    tokens, logprobs = draw(ops, row, [Sampling()], torch.tensor([u], dtype=torch.float64))
    assert row.softmax(-1)[0, tokens[0]] > 0
    torch.testing.assert_close(logprobs[0], row.log_softmax(-1)[0, tokens[0]])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
@pytest.mark.parametrize(("rows", "vocab"), [(3000, 37), (201, 1500)])
def test_fused_and_plain_draws_are_the_same_tokens(rows, vocab, temperature):
    torch.manual_seed(0)
    logits = 4 * torch.randn(rows, vocab)
    logits[:, 5] = -math.inf
    sampling = [Sampling(temperature=temperature)] * rows
    plain, fused = (draw(ops, logits, sampling, uniform(rows)) for ops in (TorchOps(), FusedOps()))
    assert torch.equal(plain[0], fused[0]) and (plain[0] != 5).all()
    torch.testing.assert_close(plain[1], fused[1], rtol=1e-6, atol=1e-6)


def test_uniform_numbers_are_splitmix64():
    """The published sequence for seed 1234567 (Vigna's splitmix64.c), 53 high bits each."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    keys, positions = torch.full((3,), 1234567), torch.tensor([1, 2, 3])
    want = torch.tensor([(x >> 11) * 2.0**-53 for x in published], dtype=torch.float64)
    assert torch.equal(random_uniform(keys, positions), want)


def test_uniform_numbers_of_neighbouring_seeds_are_unrelated():
    n = 4096
    u = torch.stack(
        [random_uniform(seed_keys(list(range(n))), torch.full((n,), p)) for p in (0, 1)]
        + [random_uniform(seed_keys(list(range(1, n + 1))), torch.zeros(n, dtype=torch.int64))]
    )
    assert u.min() >= 0 and u.max() < 1
    correlations = torch.corrcoef(u)[~torch.eye(3, dtype=torch.bool)]
    assert correlations.abs().max() < 5 / math.sqrt(n)
    assert (u.mean(1) - 0.5).abs().max() < 5 / math.sqrt(12 * n)


@given(
    st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=20, unique_by=lambda x: x % 2**64)
)
def test_distinct_seeds_have_distinct_streams(seeds):
    assert len(set(seed_keys(seeds).tolist())) == len(seeds)
    before = torch.arange(8)
    mix64(before)
    assert torch.equal(before, torch.arange(8))
