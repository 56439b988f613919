"""UAQ, update-aware quantization: a one-time rescaling before training (QuRL §4.3).

For every linear fed by an RMSNorm (q, k, v by `input_layernorm`; gate, up by
`post_attention_layernorm`):

    norm weight ← norm weight · s,    W ← W / s

In a mixture of experts the second norm feeds the router, the experts and a shared expert with its gate:
all of them are divided, quantized or not, since a norm cannot be scaled for some of its readers.
The function is preserved exactly in real arithmetic: W·(n ⊙ x) = (W/s)·((s n) ⊙ x). Biases act
after the product and stay; so do the per-head norms of q and k (Qwen3), which see the same input
as before. W is s times smaller, hence its absolute quantization error too, while its gradient is
s times larger: relative to the error an update grows by s² under SGD and by s under Adam and Muon,
whose steps do not depend on the gradient's scale. The codes stay the same where scales are real
numbers, so that under Adam this is a choice of learning rates (docs/stability.md, with measurements).
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_FED_BY = {
    "input_layernorm": re.compile(r"self_attn\.[qkv]_proj\.weight"),
    "post_attention_layernorm": re.compile(
        r"(?:mlp|block_sparse_moe)\.(?:"
        r"(?:experts\.\d+\.|shared_experts?\.)?(?:gate|up)_proj\.weight|"
        r"experts\.\d+\.w[13]\.weight|experts\.gate_up_proj|"
        r"gate\.weight|shared_expert_gate\.weight)"
    ),
}
"""Parameters within a layer that read a norm's output, in checkpoints and in transformers' fused experts."""
_FED_BY_OTHERS = re.compile(
    r"self_attn\..*|.*layernorm\.weight|.*\.down_proj(?:\.weight)?|.*\.w2\.weight|.*bias"
)


@torch.no_grad()
def apply_uaq(model: nn.Module | Mapping[str, Tensor], s: float) -> None:
    """Rescales a decoder, or its state dict under Hugging Face names, in place.

    s = 1 changes nothing. Raises ValueError when s is not positive, there is nothing to rescale, or a
    parameter of a layer is of an unknown kind.
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
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if found := re.match(r"(.*layers\.\d+)\.(.*)", name):
            layers.setdefault(found[1], {})[found[2]] = tensor
    pairs = []
    for layer, inside in layers.items():
        readers: dict[str, list[Tensor]] = {norm: [] for norm in _FED_BY}
        for name, tensor in inside.items():
            norm = next((n for n, fed in _FED_BY.items() if fed.fullmatch(name)), None)
            if norm is not None:
                readers[norm].append(tensor)
            elif not _FED_BY_OTHERS.fullmatch(name):
                raise ValueError(f"UAQ: what feeds {layer}.{name} is not known")
        pairs += [(inside[f"{norm}.weight"], fed) for norm, fed in readers.items() if fed]
    if not pairs:
        raise ValueError("UAQ: no decoder layers among the names")
    return pairs
