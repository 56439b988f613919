"""The layers that keep a state in place of keys and values (areal_q/models/layers/gated_delta.py), without
autograd.

What is kept is of one place in a text, its end, so that no page of it can be found by a later prompt: a prompt
is computed from its first token on, and each response to it begins with a copy of what it ended with. When
weights change, it is kept, or computed again from the first token, as `kv_on_update` says of keys and values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.linear.quantized_linear import Linear
from areal_q.models.config import DeltaRule
from areal_q.models.layers.gated_delta import gates, mix
from rollout.engines.reference.kv_cache import PrefillAttention, States


@dataclass(frozen=True)
class DeltaLayer:
    number: int
    """Among the layers that keep a state"""
    rule: DeltaRule
    qkv: Linear
    z: Linear
    a: Tensor
    """float32 [heads, D], as is `b`"""
    b: Tensor
    log_a: Tensor
    """float32 [heads], as is `bias`"""
    bias: Tensor
    kernel: Tensor
    """The weights of the convolution, float32 [channels, 1, K]"""
    norm: Tensor
    """Factors of the RMSNorm of each head, float32 [value_dim]"""
    eps: float

    def __call__(self, x: Tensor, texts: "DeltaPass") -> Tensor:
        """Returns what the layer found for out_proj, float32 [T, values], of x [T, D]."""
        rates = gates(F.linear(x, self.a), F.linear(x, self.b), self.log_a, self.bias)
        found = texts.advance(self, self.qkv(x, None), *rates)
        normed = F.rms_norm(found, found.shape[-1:], self.norm, self.eps)
        return (normed * F.silu(self.z(x, None).view_as(normed))).flatten(-2)


class DeltaPass:
    """The states of a forward pass over a token of each of R rows and, after them, the pieces of prompts, which
    leaves in them what is kept behind these tokens."""

    def __init__(self, rows: States, prefill: PrefillAttention | None) -> None:
        self.rows, self.prefill = rows, prefill
        self.ones = torch.ones(len(rows.inputs), 1, dtype=torch.int64, device=rows.inputs.device)
        for piece in prefill.pieces if prefill else ():
            for kept in piece.states or () if piece.start == 0 else ():
                kept.zero_()

    def advance(self, layer: DeltaLayer, x: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Returns what the heads of `layer` found, [T, heads, value_dim], from q, k and v before the
        convolution, x [T, channels], and `decay` and `beta` [T, heads]."""
        rows, at, found = len(self.rows.inputs), layer.number, list[Tensor]()
        if rows:
            each, fades, writes = (y[:rows].unsqueeze(1) for y in (x, decay, beta))
            inputs, memory = self.rows.inputs[:, at], self.rows.memory[:, at]
            found.append(_advance(layer, each, fades, writes, self.ones, inputs, memory))
        if self.prefill:
            texts = [piece.states for piece in self.prefill.pieces if piece.states]
            inputs, memory = (torch.stack([y[at] for y in of]) for of in zip(*texts, strict=True))
            x, decay, beta = (y[rows:][self.prefill.pad] for y in (x, decay, beta))
            counts = self.prefill.counts.unsqueeze(1)
            inside = (torch.arange(x.shape[1], device=x.device) < counts).unsqueeze(-1)
            out = _advance(layer, x, decay * inside, beta * inside, counts, inputs, memory)
            for number, text in enumerate(texts):
                text.inputs[at], text.memory[at] = inputs[number], memory[number]
            found.append(out.index_select(0, self.prefill.unpad))
        return torch.cat(found)


def _advance(
    layer: DeltaLayer,
    x: Tensor,
    decay: Tensor,
    beta: Tensor,
    counts: Tensor,
    inputs: Tensor,
    memory: Tensor,
) -> Tensor:
    """Returns what was found for N texts of at most P tokens, [N · P, heads, value_dim], and leaves in `inputs`
    and `memory` what is kept behind their first `counts` int64 [N, 1] tokens. Behind those, `decay` and `beta`
    are 0."""
    found, new = mix(x, decay, beta, layer.kernel, inputs, memory, layer.rule)
    memory.copy_(new)
    last = counts + torch.arange(inputs.shape[1], device=x.device)
    last = last.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    inputs.copy_(torch.cat((inputs, x), 1).gather(1, last))
    return found.flatten(0, 1)
