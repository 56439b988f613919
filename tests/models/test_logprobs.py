"""Log-probs without the logits: against the definition, finite differences and torch's own fused loss."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from areal_q.models.logprobs import BLOCK, blockwise, head_logprobs, whole
from bench.learner.memory import peak_bytes

Case = tuple[Tensor, Tensor, Tensor]


def case(tokens: int, vocab: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Case:
    g = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=g, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,), generator=g)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(found: tuple[Tensor, Tensor], inputs: Case) -> tuple[Tensor, Tensor]:
    """Of a loss in which every token weighs differently, and its entropy counts if it learns."""
    scale = torch.linspace(-1, 2, len(found[0]), dtype=found[0].dtype)
    loss = (scale * found[0]).sum() + (scale.flip(0) * found[1]).sum()
    to_hidden, to_weight = torch.autograd.grad(loss, inputs[:2])
    return to_hidden, to_weight


@pytest.mark.parametrize("entropy_learns", [False, True])
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 256), (7, 257), (33, 1000), (5, 2000)])
def test_blocks_give_what_the_definition_gives(tokens: int, vocab: int, entropy_learns: bool):
    inputs = case(tokens, vocab)
    exact = case(tokens, vocab, dtype=torch.float64)
    found = blockwise(*inputs, 0.7, entropy_learns, block=1)
    expected = whole(*exact, 0.7, entropy_learns)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(found, inputs), gradients(expected, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_no_logit_is_rounded_to_the_dtype_of_the_head():
    """Ranks in bfloat16 have both so: few tokens were off by 0.04 nats, many, in blocks, by nothing."""
    hidden, weight, targets = case(8, 500, 64, torch.bfloat16)
    found = head_logprobs(hidden, weight, targets)
    wanted = whole(hidden.double(), weight.double(), targets, 1.0, False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_gradient_is_the_slope(temperature: float):
    hidden, weight, targets = case(3, 300, 4, torch.float64)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return blockwise(hidden, weight, targets, temperature, True, block=1)

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.11 has none"
)
def test_the_loss_is_that_of_torchs_own_fused_one():
    hidden, weight, targets = case(20, 700)
    logprobs, _ = blockwise(hidden, weight, targets, 1.0, False, block=1)
    theirs = torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="sum")
    torch.testing.assert_close(-logprobs.sum(), theirs)
    for one, other in zip(
        torch.autograd.grad(-logprobs.sum(), (hidden, weight)),
        torch.autograd.grad(theirs, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_entropy_that_does_not_learn_has_no_gradient():
    hidden, weight, targets = case(5, 600)
    _, entropy = blockwise(hidden, weight, targets, 1.0, False)
    assert not entropy.requires_grad


def test_large_logits_and_certain_tokens_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0], [0.0]], requires_grad=True)
    weight = torch.linspace(-1, 1, 520)[:, None].requires_grad_()
    found = blockwise(hidden, weight, torch.tensor([519, 519, 0]), 1.0, True, block=1)
    exact = whole(hidden.double(), weight.double(), torch.tensor([519, 519, 0]), 1.0, True)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    inputs = (hidden, weight, torch.tensor([519, 519, 0]))
    assert all(torch.isfinite(g).all() for g in gradients(found, inputs))


def test_bfloat16_factors_are_summed_in_float32():
    hidden, weight, targets = case(9, 900, 64, torch.bfloat16)
    found = blockwise(hidden, weight, targets, 1.0, True, block=1)
    exact = whole(hidden.double(), weight.double(), targets, 1.0, True)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
    to_hidden, to_weight = gradients(found, (hidden, weight, targets))
    assert to_hidden.dtype == to_weight.dtype == torch.bfloat16


def test_tied_weights_get_the_gradient_of_both_uses():
    _, weight, targets = case(6, 800)
    ids = torch.tensor([1, 5, 5, 799, 0, 2])
    found = blockwise(weight[ids], weight, targets, 1.0, False, block=1)[0].sum()
    expected = whole(weight[ids], weight, targets, 1.0, False)[0].sum()
    one, other = (torch.autograd.grad(loss, weight)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_small_heads_are_computed_whole_and_large_ones_in_blocks():
    hidden, weight, targets = case(8, 500)
    both = head_logprobs(hidden, weight, targets), whole(hidden, weight, targets, 1.0, False)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    tokens = 5 * BLOCK // 1000
    hidden, weight, targets = case(tokens, 1000, 2)
    found = head_logprobs(hidden, weight, targets)
    both = found, blockwise(hidden, weight, targets, 1.0, False)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    assert not torch.equal(found[0], whole(hidden, weight, targets, 1.0, False)[0])


@pytest.mark.timeout(60)
def test_large_vocabulary_takes_a_fifth_of_the_memory():
    inputs = case(256, 152_000, 64)

    def peak(side: Callable[..., tuple[Tensor, Tensor]]) -> int:
        return peak_bytes(lambda: side(*inputs, 0.7, True)[0].sum().backward())

    assert peak(blockwise) < peak(whole) / 5


def test_no_tokens_have_no_log_probs_and_no_gradient():
    """As of a rank whose share of a micro-batch is a prompt's beginning."""
    hidden, weight = torch.zeros(0, 32, requires_grad=True), torch.randn(257, 32)
    weight.requires_grad_()
    logprobs, entropy = blockwise(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0, True)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None and not weight.grad.any()
