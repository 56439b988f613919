"""The decoder in bfloat16 on a CPU, against float64, against autocast and against transformers."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, Qwen2Config

from areal_q.kernels.training.pointwise import add_norm
from areal_q.models import Decoder, DecoderConfig, Experts, PackedLayout, init_weights, load_decoder
from areal_q.models.fused import functions, trunk
from areal_q.models.logprobs import head_logprobs
from areal_q.models.low_bit.bf16_rounding import round_rest
from areal_q.models.packed_layout import Segment

ROUNDING = 2.0**-8
"""Twice the largest relative error of a number rounded to bfloat16"""
SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "width": 48,
    "layers": 2,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp": 80,
    "max_positions": 64,
}
LAYOUT = PackedLayout.of_forest(
    [
        *(Segment(8), Segment(0, 0, 5), Segment(9, 0, 5), Segment(4, 2, 11), Segment(3, 3, 15)),
        *(Segment(2), Segment(22), Segment(13, 6, 20)),
    ]
)


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "smollm3": {"o_bias": True, "unrotated": (1,)},  # without RoPE, a bias of k has gradient 0
    "mistral": {"window": 64, "sliding": (0, 1)},
}


def decoder(family: str, tied: bool = True) -> Decoder:
    """Returns a decoder whose norms and biases differ from those of a fresh one, to be noticed."""
    variant = VARIANTS.get(family, {})
    model = Decoder(DecoderConfig(family=family, tied=tied, **variant, **SHAPE))
    init_weights(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def token_ids() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, SHAPE["vocab_size"], (len(LAYOUT.positions),), generator=generator)


def states_and_gradients(model: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the hidden states and the gradient of each weight, float64."""
    hidden = model(token_ids(), LAYOUT).double()
    slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).double()
    (hidden * slope).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    # A tied embedding's is sparse without the output head's.
    return hidden.detach(), {name: g.to_dense().double() for name, g in gradients.items()}


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).detach().norm() / exact.detach().norm())


def joined(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def rounded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def agrees(apply: Callable[..., Tensor], exact: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compares values and gradients of `apply` with those of `exact` in float64, within rounding."""
    own = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    found, expected = apply(*own), exact(*wide)
    assert error(found.detach().double(), expected.detach()) < 2 * ROUNDING
    slope = rounded(*expected.shape)
    found.backward(slope.to(found.dtype))
    expected.backward(slope.double())
    for x, y in zip(own, wide, strict=True):
        assert x.grad is not None and y.grad is not None and x.grad.dtype == x.dtype
        assert error(x.grad.double(), y.grad) < 2 * ROUNDING


def test_projections_side_by_side_are_those_apart():
    weights = [torch.randn(n, 32) for n in (16, 8, 8)]
    biases = [torch.randn(n) for n in (16, 8, 8)]
    agrees(
        functions.Projections.apply,
        lambda x, *p: torch.cat([x @ w.t() + b for w, b in zip(p[:3], p[3:], strict=True)], -1),
        rounded(20, 32),
        *weights,
        *biases,
    )


def test_swiglu_mlp_agrees_with_its_definition():
    agrees(
        functions.SwigluMlp.apply,
        lambda x, gate, up, down: (
            (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        ),
        rounded(20, 32),
        torch.randn(24, 32) / 6,
        torch.randn(24, 32) / 6,
        torch.randn(32, 24) / 5,
    )


@pytest.mark.parametrize("adds", [True, False])
def test_add_norm_agrees_with_torch(adds: bool):
    def exact(x: Tensor, weight: Tensor, delta: Tensor | float = 0.0) -> Tensor:
        total = x + delta
        norm = torch.nn.functional.rms_norm(total, (48,), weight, 1e-5)
        return total * 0.5 + norm

    def fused(x: Tensor, weight: Tensor, delta: Tensor | None = None) -> Tensor:
        total, y = functions.AddNorm.apply(x, delta, weight, 1e-5)  # type: ignore[misc]
        return total * 0.5 + y

    more = [rounded(20, 48)] if adds else []
    agrees(fused, exact, torch.randn(20, 48), torch.randn(48), *more)


def test_a_norm_without_use_passes_the_gradient_on():
    x, delta = torch.randn(3, 8, requires_grad=True), rounded(3, 8).requires_grad_()
    total, _ = functions.AddNorm.apply(x, delta, torch.ones(8), 1e-6)  # type: ignore[misc]
    total.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3, 8))
    assert delta.grad is not None and torch.equal(delta.grad, torch.ones(3, 8).bfloat16())


@pytest.mark.parametrize("family", ["qwen3", "llama", *VARIANTS])
@pytest.mark.parametrize("tied", [True, False])
def test_fused_decoder_is_no_coarser_than_autocast(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    exact, fused = decoder(family, tied).double(), decoder(family, tied)
    autocast = copy.deepcopy(fused)
    fused.dtype = autocast.dtype = torch.bfloat16
    hidden, gradients = states_and_gradients(exact)
    found, of_fused = states_and_gradients(fused)
    assert found.isfinite().all() and trunk.suits(fused.model, LAYOUT)
    monkeypatch.setattr(trunk, "suits", lambda *_: False)
    coarse, of_autocast = states_and_gradients(autocast)
    assert not torch.equal(found, coarse), "both ran the same way"
    assert error(found, hidden) < 1.5 * error(coarse, hidden) < 0.05
    assert of_fused.keys() == gradients.keys()
    assert error(joined(of_fused), joined(gradients)) < 1.5 * error(
        joined(of_autocast), joined(gradients)
    )
    for name, g in gradients.items():
        assert error(of_fused[name], g) < 0.1, name


@pytest.mark.parametrize("dim", [8, 16, 24])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 33, 70])
def test_attention_agrees_with_torch_at_every_length(length: int, dim: int):
    def exact(qkv: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1) for part in qkv.split((4, 2, 2), 1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1)

    layout = PackedLayout.of([length])
    agrees(lambda qkv: functions.Attend.apply(qkv, 4, layout), exact, rounded(length, 8, dim))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_attention_agrees_with_torch_without_avx512():
    narrow = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma"}
    command = [sys.executable, "-m", "pytest", "-n0", "-k", "every_length", __file__]
    done = subprocess.run(command, env=os.environ | narrow, capture_output=True, text=True)
    assert done.returncode == 0 and "27 passed" in done.stdout, done.stdout


def test_a_sequence_is_attended_as_if_it_were_alone():
    lengths = [19, 3, 40, 1]
    qkv, grad = rounded(sum(lengths), 8, 16), rounded(sum(lengths), 4, 16)

    def attended(rows: slice, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        own = qkv[rows].clone().requires_grad_()
        out: Any = functions.Attend.apply(own, 4, layout)
        out.backward(grad[rows])
        assert own.grad is not None
        return out.detach(), own.grad

    together = attended(slice(None), PackedLayout.of(lengths))
    for start, stop in pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()]):
        alone = attended(slice(start, stop), PackedLayout.of([stop - start]))
        assert all(torch.equal(a[start:stop], b) for a, b in zip(together, alone, strict=True))


def test_gradients_of_weights_stay_float32():
    model = decoder("qwen3")
    model.dtype = torch.bfloat16
    model(token_ids(), LAYOUT).sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_tied_weight_gets_the_gradient_of_both_uses():
    model, exact = decoder("qwen2"), decoder("qwen2").double()
    model.dtype, ids = torch.bfloat16, token_ids()
    for each in (model, exact):
        head_logprobs(each(ids, LAYOUT), each.head, ids.roll(1))[0].sum().backward()
    found, wanted = (each.model.embed_tokens.weight.grad for each in (model, exact))
    assert found is not None and wanted is not None and not found.is_sparse
    assert error(found.double(), wanted) < 8 * ROUNDING


def test_recomputed_layers_give_the_same_bits():
    once, twice = decoder("qwen3"), decoder("qwen3")
    once.dtype = twice.dtype = torch.bfloat16
    twice.recompute_layers(True)
    (hidden, gradients), (again, recomputed) = map(states_and_gradients, (once, twice))
    assert torch.equal(hidden, again)
    assert all(torch.equal(g, recomputed[name]) for name, g in gradients.items())


def test_long_sequences_give_what_short_ones_do(monkeypatch: pytest.MonkeyPatch):
    model, other = decoder("qwen3"), decoder("qwen3")
    model.dtype = other.dtype = torch.bfloat16
    hidden, gradients = states_and_gradients(model)
    monkeypatch.setattr(trunk, "_LONGEST", 4)
    torchs, others = states_and_gradients(other)
    assert error(hidden, torchs) < 4 * ROUNDING
    assert all(error(g, others[name]) < 10 * ROUNDING for name, g in gradients.items())


def test_a_batch_of_other_size_compiles_no_product(capfd: pytest.CaptureFixture[str]):
    model = decoder("qwen3")
    model.dtype = torch.bfloat16

    def learn(tokens: int) -> None:
        ids = torch.arange(tokens) % SHAPE["vocab_size"]
        hidden = model(ids, PackedLayout.of([tokens]))
        head_logprobs(hidden, model.head, ids)[0].sum().backward()

    mkldnn: Any = torch.backends.mkldnn
    learn(20)
    with mkldnn.verbose(mkldnn.VERBOSE_ON_CREATION):
        learn(29)
    assert "cache_miss" not in capfd.readouterr().out


def test_layers_of_other_arithmetic_are_not_fused():
    assert trunk.suits(decoder("qwen3").model, LAYOUT)
    rounds = decoder("qwen3")
    round_rest(rounds)
    assert not trunk.suits(rounds.model, LAYOUT)
    shape = DecoderConfig(family="qwen3_moe", experts=Experts(count=2, per_token=1, mlp=8), **SHAPE)
    assert not trunk.suits(Decoder(shape).model, LAYOUT)
    for variant in ({"mlp_bias": True}, {"window": LAYOUT.longest - 1, "sliding": (1,)}):
        shape = DecoderConfig(family="llama", **variant, **SHAPE)  # type: ignore[arg-type]
        assert not trunk.suits(Decoder(shape).model, LAYOUT)
    observed = decoder("qwen3")
    observed.model.layers[1].self_attn.observe = lambda q, k, v: None  # type: ignore[union-attr]
    assert not trunk.suits(observed.model, LAYOUT)


def test_a_weight_that_is_not_finite_shows():
    model = decoder("qwen3")
    model.dtype = torch.bfloat16
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[0, 0] = torch.nan  # type: ignore[union-attr]
    assert model(token_ids(), LAYOUT).isnan().any()


@pytest.mark.parametrize("value", [1.0, -1.00390625, 3e38, 3.4e38, torch.inf, -0.0, 1e-40])
def test_kernels_round_to_bfloat16_as_torch_does(value: float):
    x = torch.tensor([[value, 1.01171875, 1.00390625]])
    out, y = torch.empty_like(x), torch.empty(1, 3, dtype=torch.bfloat16)
    scale = torch.empty(1)
    weight = torch.ones(3)
    add_norm(
        *functions.arrays(x, torch.zeros(0, 1).bfloat16(), weight),
        1e-6,
        *functions.arrays(out, y, scale),
    )
    assert torch.equal(y.view(torch.int16), (x * scale).bfloat16().view(torch.int16)) or (
        y.isnan().equal((x * scale).bfloat16().isnan())
    )


def test_fused_decoder_agrees_with_transformers(tmp_path):
    shape = Qwen2Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(shape).float()
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    ours.dtype = torch.bfloat16
    lengths = [5, 17, 1, 30]
    ids = torch.randint(0, 40, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    hidden = ours(ids, PackedLayout.of(lengths))
    for start, stop in pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()]):
        expected = theirs.model(ids[None, start:stop]).last_hidden_state[0]
        assert error(hidden[start:stop].double(), expected.double()) < 0.02
