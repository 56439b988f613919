"""UAQ, update-aware quantization: a one-time rescaling before training (QuRL §4.3).

For every linear fed by an RMSNorm (q, k, v by `input_layernorm`; gate, up by
`post_attention_layernorm`):

    norm weight ← norm weight · s,    W ← W / s

The function is preserved exactly in real arithmetic: W·(n ⊙ x) = (W/s)·((s n) ⊙ x). Biases act
after the product and stay; so do the per-head norms of q and k (Qwen3), which see the same input
as before. W is s times smaller, hence its absolute quantization error too, while its gradient is
s times larger: relative to the error an update grows by s² under SGD and by s under Adam, whose
step does not depend on the gradient's scale.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_FED_BY = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@torch.no_grad()
def apply_uaq(model: nn.Module | Mapping[str, Tensor], s: float) -> None:
    """Rescales a decoder, or its state dict under Hugging Face names, in place.

    s = 1 changes nothing. Raises ValueError when s is not positive or there is nothing to rescale.
    """
    for norm, linears in _fed(model, s):
        norm.mul_(s)
        for weight in linears:
            weight.div_(s)


@torch.no_grad()
def fold_back(model: nn.Module | Mapping[str, Tensor], s: float) -> None:
    """Undoes `apply_uaq(model, s)`: an exported checkpoint is in the original parameterisation.

    Equal to the original to float rounding, and bit for bit when s is a power of two.
    """
    for norm, linears in _fed(model, s):
        norm.div_(s)
        for weight in linears:
            weight.mul_(s)


def _fed(model: nn.Module | Mapping[str, Tensor], s: float) -> list[tuple[Tensor, list[Tensor]]]:
    """Every norm weight with the weights of the linears that it feeds."""
    if not s > 0:
        raise ValueError(f"UAQ's scale must be positive, not {s}")
    state = model.state_dict() if isinstance(model, nn.Module) else model
    pairs = []
    for name, tensor in state.items():
        layer, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in _FED_BY:
            pairs.append((tensor, [state[f"{layer}.{x}.weight"] for x in _FED_BY[norm]]))
    if not pairs:
        raise ValueError("UAQ: no decoder norm among the names")
    return pairs
