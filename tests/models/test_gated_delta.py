"""The gated delta rule against its equations, token by token, and against transformers' gradients."""

from typing import Any

import pytest
import torch
from helpers.kinds import config_of
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from areal_q.models import Decoder, DecoderConfig, PackedLayout
from areal_q.models.config import DeltaRule
from areal_q.models.layers.gated_delta import empty_state, gates, mix

RULE = DeltaRule(layers=(0,), key_heads=2, value_heads=4, key_dim=5, value_dim=3, kernel=4)
SHAPE: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip
LENGTHS = [5, 1, 64, 131, 17]


def token_by_token(x: Tensor, decay: Tensor, beta: Tensor, kernel: Tensor) -> Tensor:
    """The equations of the paper for one row x [L, channels], [L, heads, value_dim], in float64."""
    x, decay, beta, kernel = (y.double() for y in (x, decay, beta, kernel))
    state, outputs = x.new_zeros(RULE.value_heads, RULE.key_dim, RULE.value_dim), []
    for t in range(len(x)):
        seen = [x[t - i] * kernel[:, 0, -1 - i] for i in range(min(RULE.kernel, t + 1))]
        q, k, v = F.silu(torch.stack(seen).sum(0)).split((10, 10, 12))
        for h in range(RULE.value_heads):
            key, query = k.view(2, 5)[h // 2], q.view(2, 5)[h // 2]
            key, query = (y / (y.square().sum() + 1e-6).sqrt() for y in (key, query))
            state[h] *= decay[t, h].exp()
            told = beta[t, h] * (v.view(4, 3)[h] - key @ state[h])
            state[h] += torch.outer(key, told)
            outputs.append(query @ state[h] / 5**0.5)
    return torch.stack(outputs).view(len(x), RULE.value_heads, RULE.value_dim)


@pytest.mark.parametrize("fades", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("cuts", [(150,), (63, 1, 1, 64, 21), (1,) * 70 + (80,)])
def test_any_cut_of_a_text_gives_what_the_equations_say(
    cuts: tuple[int, ...], fades: float
) -> None:
    """A text in one call, and in several that go on from what the one before has left."""
    generator = torch.Generator().manual_seed(0)
    x, kernel, a, b, log_a = (
        torch.randn(*shape, generator=generator)
        for shape in (
            (1, 150, RULE.channels),
            (RULE.channels, 1, 4),
            (1, 150, 4),
            (1, 150, 4),
            (4,),
        )
    )
    decay, beta = gates(a, b, log_a + torch.tensor(fades).log(), torch.zeros(4))
    inputs, state = empty_state(RULE, 1, x)
    found, start = [], 0
    for count in cuts:
        at = slice(start, start + count)
        out, state = mix(x[:, at], decay[:, at], beta[:, at], kernel, inputs, state, RULE)
        inputs = torch.cat((inputs, x[:, at]), 1)[:, count:]
        found.append(out[0])
        start += count
    want = token_by_token(x[0], decay[0], beta[0], kernel)
    torch.testing.assert_close(torch.cat(found).double(), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "variant", ["qwen3_5_text", "qwen3_5_text, yarn, biases, a state in layer 1"]
)
def test_log_probs_and_gradients_are_those_of_transformers(variant: str, recompute: bool) -> None:
    """Of sequences that are packed together, beside each of them alone."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config_of(variant, SHAPE), dtype=torch.float32)
    for p in theirs.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    ours = Decoder(DecoderConfig.from_hf(theirs.config.to_dict()).validate())
    ours.load_state_dict(theirs.state_dict())
    ours.recompute_layers(recompute)
    ids = torch.randint(0, SHAPE["vocab_size"], (sum(LENGTHS),))
    weight = torch.randn(sum(LENGTHS), 1)
    packed = ours.logits(ours(ids, PackedLayout.of(LENGTHS))).log_softmax(-1)
    alone = torch.cat([theirs(part[None]).logits[0] for part in ids.split(LENGTHS)]).log_softmax(-1)
    assert alone.std() > 0.1
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
    for logprobs in (packed, alone):
        (logprobs.gather(1, ids[:, None]) * weight).mean().backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], atol=1e-5, rtol=1e-5, msg=name)
