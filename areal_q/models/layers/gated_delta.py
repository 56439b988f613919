r"""Layers that keep a state in place of keys and values: the gated delta rule (arXiv 2412.06464).

q, k and v pass a short causal convolution, channel by channel, and SiLU. Each head then has a state S
[key_dim, value_dim], 0 before the first token, which is a memory of values by keys. A token makes it fade,
reads what it has under its key, and corrects that towards its value:

    S ← α_t S,    u_t = β_t (v_t - Sᵀ k_t),    S ← S + k_t u_tᵀ,    o_t = Sᵀ q_t / √key_dim

    α_t = exp(-exp(A) · softplus(a_t + d)),    β_t = σ(b_t),    |k_t| = |q_t| = 1

a and b are linear in the token; A and d are a number for each head. Within a chunk of C tokens, with the state
S before it and g_t = Σ_{i≤t} ln α_i, all u follow from one triangular system, as u_t depends on those before:

    u_t + β_t Σ_{i<t} e^(g_t - g_i) (k_t · k_i) u_i = β_t (v_t - e^(g_t) Sᵀ k_t)
    o_t = (e^(g_t) Sᵀ q_t + Σ_{i≤t} e^(g_t - g_i) (q_t · k_i) u_i) / √key_dim
    S ← e^(g_C) S + Σ_i e^(g_C - g_i) k_i u_iᵀ

All of it is in float32, whatever the rest does. Notation: N rows of L tokens, H heads of values.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.models.config import DecoderConfig, DeltaRule
from areal_q.models.layer_kinds import CHUNK
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.norm import HeadNorm, wide
from areal_q.models.low_bit.bf16_rounding import straight
from areal_q.models.packed_layout import PackedLayout

_NORM_EPS = 1e-6
"""What is added to the squared norm of a query and a key"""


class GatedDelta(nn.Module):
    """The layer that stands in place of attention: x [T, width] → [T, width].

    A row of the layout is computed from its first token on, so that a prompt which several responses share is
    computed once for each of them between the projections, and once for all in these."""

    def __init__(self, config: DecoderConfig, rule: DeltaRule) -> None:
        super().__init__()
        self.rule = rule
        values = rule.value_heads * rule.value_dim
        self.dt_bias = nn.Parameter(torch.zeros(rule.value_heads))
        self.A_log = nn.Parameter(torch.zeros(rule.value_heads))
        self.conv1d = nn.Conv1d(
            rule.channels, rule.channels, rule.kernel, groups=rule.channels, bias=False
        )
        self.norm = HeadNorm(rule.value_dim, config.norm_eps)
        self.out_proj = Linear(values, config.width, bias=False)
        self.in_proj_qkv = Linear(config.width, rule.channels, bias=False)
        self.in_proj_z = Linear(config.width, values, bias=False)
        self.in_proj_b = Linear(config.width, rule.value_heads, bias=False)
        self.in_proj_a = Linear(config.width, rule.value_heads, bias=False)

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        assert layout.share is None
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        with torch.autocast(x.device.type, enabled=False):
            a, b, log_a, bias, kernel = (
                straight(p) if self.in_proj_a.rounds_rest else p
                for p in (
                    self.in_proj_a.weight, self.in_proj_b.weight,
                    self.A_log, self.dt_bias, self.conv1d.weight,
                )
            )  # fmt: skip
            x, qkv = wide(x), wide(qkv)
            decay, beta = gates(F.linear(x, a), F.linear(x, b), log_a, bias)
            outputs = []
            for bucket in layout.buckets:
                rows, flat = bucket.rows.shape, bucket.rows.flatten()
                x, fades, writes = (
                    y.index_select(0, flat).unflatten(0, rows) for y in (qkv, decay, beta)
                )
                before, state = empty_state(self.rule, rows[0], qkv)
                found, _ = mix(x, fades, writes, kernel, before, state, self.rule)
                outputs.append(found[:, bucket.first :].flatten(0, 1))
            mixed = torch.cat(outputs).index_select(0, layout.unpad)
            gated = self.norm(mixed) * F.silu(wide(z).view_as(mixed))
        return self.out_proj(gated.flatten(-2))


def empty_state(rule: DeltaRule, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a layer keeps before the first token: the convolution's inputs [N, kernel - 1, channels] and
    the states [N, H, key_dim, value_dim]."""
    heads = rule.value_heads, rule.key_dim, rule.value_dim
    return like.new_zeros(rows, rule.kernel - 1, rule.channels), like.new_zeros(rows, *heads)


def gates(a: Tensor, b: Tensor, log_a: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ln α and β, [T, H] each."""
    return -log_a.exp() * F.softplus(a + bias), b.sigmoid()


def mix(
    x: Tensor,
    decay: Tensor,
    beta: Tensor,
    kernel: Tensor,
    before: Tensor,
    state: Tensor,
    rule: DeltaRule,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [N, L, H, value_dim] and the states behind the last token, from q, k and v before the
    convolution, x [N, L, channels], ln α and β [N, L, H], the convolution's `kernel` [channels, 1, K], and what
    is kept of the tokens before: `before` and `state`, as `empty_state` has them. A token whose `decay` and
    `beta` are 0 leaves its state as it is."""
    length, keys = x.shape[1], rule.key_heads * rule.key_dim
    x = torch.cat((before, x), 1)
    taps = [x[:, i : i + length] * kernel[:, 0, i] for i in range(rule.kernel)]
    q, k, v = F.silu(reduce(torch.add, taps)).split((keys, keys, x.shape[-1] - 2 * keys), -1)
    q, k = (_unit(y.unflatten(-1, (rule.key_heads, -1))) for y in (q, k))
    v = v.unflatten(-1, (rule.value_heads, -1))
    return _delta_rule(q * rule.key_dim**-0.5, k, v, decay, beta, state)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what `mix` does, from q and k [N, L, key_heads, key_dim] and v [N, L, H, value_dim]; several
    heads of values share a head of keys."""
    length, serves = v.shape[1], v.shape[2] // k.shape[2]
    size = min(CHUNK, length)
    added = -length % size
    q, k = (x.repeat_interleave(serves, 2) for x in (q, k))
    # [N, H, chunks, C, ·]; added tokens change no state.
    q, k, v, decay, beta = (
        F.pad(x.transpose(1, 2), (0, 0, 0, added)).unflatten(2, (-1, size))
        for x in (q, k, v, decay.unsqueeze(-1), beta.unsqueeze(-1))
    )
    passed = decay.double().cumsum(3)  # small differences of what may be large
    since = (passed - passed.mT).masked_fill(passed.new_ones(size, size).triu(1) > 0, -torch.inf)
    left, since, until = (
        x.exp().to(v.dtype) for x in (passed, since, passed[..., -1:, :] - passed)
    )
    known = k * beta
    right = torch.cat((v * beta, known * left), -1)
    # Its diagonal is taken for 1, and what is above that for 0.
    system = (known @ k.mT) * since
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, old = solved.split((v.shape[-1], k.shape[-1]), -1)
    within, reads, writes = (q @ k.mT) * since, q * left, (k * until).mT
    outputs = []
    for chunk in range(q.shape[2]):
        update = new[:, :, chunk] - old[:, :, chunk] @ state
        outputs.append(reads[:, :, chunk] @ state + within[:, :, chunk] @ update)
        state = state * left[:, :, chunk, -1:] + writes[:, :, chunk] @ update
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state
