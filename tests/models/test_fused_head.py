"""The head of a decoder in bfloat16 on a CPU, against the definition in float64."""

import pytest
import torch
from torch import Tensor

from areal_q.models.logprobs import blocks, head_logprobs, whole


def case(tokens: int, vocabulary: int, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden states, a weight and targets, of which every other is the likeliest."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 24, generator=generator).bfloat16()
    # The weight is one that bfloat16 holds, as a processor may round it.
    weight = (torch.randn(vocabulary, 24, generator=generator) * scale).bfloat16().float()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::2] = (hidden.float() @ weight.t()).argmax(-1)[::2]
    return hidden, weight, targets


def outcome(
    fused: bool, case: tuple[Tensor, Tensor, Tensor], temperature: float, learns: bool
) -> list[Tensor]:
    """Returns log-probs, entropies, and the gradients of hidden states and weight, float64."""
    hidden, weight, targets = case
    own = (hidden if fused else hidden.double()).clone().requires_grad_()
    theirs = (weight if fused else weight.double()).clone().requires_grad_()
    way = head_logprobs if fused else whole
    logprobs, entropies = way(own, theirs, targets, temperature, learns)
    slope = torch.linspace(-1, 1, len(targets))
    total = (logprobs * slope).sum() + (entropies.sum() * 0.3 if learns else 0)
    total.backward()
    assert own.grad is not None and theirs.grad is not None
    assert own.grad.dtype == own.dtype and theirs.grad.dtype == theirs.dtype
    return [x.detach().double() for x in (logprobs, entropies, own.grad, theirs.grad)]


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("vocabulary", [3, 256, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_head_agrees_with_the_definition(
    temperature: float,
    vocabulary: int,
    learns: bool,
    packs: bool,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """Whether the weight is packed or not, which is as the processor has it, and whether exponentials are kept
    or not."""
    monkeypatch.setattr("areal_q.models.fused.head._KEPT", kept)
    monkeypatch.setattr("areal_q.models.fused.head._packs", lambda: packs)
    monkeypatch.setattr("areal_q.models.logprobs.BLOCK", 1)
    inputs = case(20, vocabulary)
    fused, exact = (outcome(way, inputs, temperature, learns) for way in (True, False))
    for found, expected in zip(fused[:2], exact[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(fused[2:], exact[2:], strict=True):
        assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_confident_token_keeps_the_sign_of_its_gradient(
    kept: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("areal_q.models.fused.head._KEPT", kept)
    hidden, weight = torch.ones(1, 3).bfloat16(), torch.zeros(20, 3)
    weight[7] = 2.265625  # the logit, 6.796875, lies between two numbers of bfloat16
    target = torch.tensor([7])
    found, exact = (outcome(way, (hidden, weight, target), 1.0, False)[3] for way in (True, False))
    torch.testing.assert_close(found[7], exact[7], rtol=0.02, atol=0)


def test_targets_outside_the_rows_have_the_logit_zero():
    hidden, weight, _ = case(2, 600)
    hidden.requires_grad_()
    chosen, lse, _ = blocks(hidden, weight, torch.tensor([-1, 600]), 1.0)
    assert chosen.tolist() == [0, 0]
    torch.testing.assert_close(lse, (hidden.float() @ weight.t()).logsumexp(-1))
    assert not torch.autograd.grad(chosen.sum(), hidden)[0].any()


def test_a_hidden_state_that_is_not_finite_shows():
    hidden, weight, targets = case(3, 600)
    hidden[1, 0] = torch.nan
    logprobs, entropies = head_logprobs(hidden, weight, targets)
    for found in (logprobs, entropies):
        assert found.isnan().tolist() == [False, True, False]
