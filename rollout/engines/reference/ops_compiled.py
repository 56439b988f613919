"""TorchOps with each chain of small operations as one kernel of torch.compile: Triton on a GPU, C++ on a CPU.

The kernels are compiled with the first weights, before the first ticket, for any number of rows (`dynamic`).
Later versions use the same kernels, since weights are arguments. Matrix products and attention are those of
TorchOps, and the results agree with it to float32 rounding.

The kernels are meant for a GPU, where every small operation is a launch; they have not been measured there. On
a CPU they are slower: at 64 rows (D = 256, V = 512, one busy core) the operations of one layer and one draw
took 441 μs, those of TorchOps 258 μs and those of FusedOps 160 μs, and the first weights waited 63 s for the
compiler.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_q.models.layers.rope import apply_rope
from rollout.engines.reference.ops import TorchOps
from rollout.engines.reference.sampling import Knobs, draw_scaled, scaled_logits, truncate


@torch.compile(dynamic=True)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@torch.compile(dynamic=True)
def _rotated(qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rope(qk, cos, sin)


@torch.compile(dynamic=True)
def _normed_rotated(qk: Tensor, norm: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rope(F.rms_norm(qk, qk.shape[-1:], eps=eps) * norm, cos, sin)


@torch.compile(dynamic=True)
def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


_scaled = torch.compile(scaled_logits, dynamic=True)
_drawn = torch.compile(draw_scaled, dynamic=True)


class CompiledOps(TorchOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def rotate(
        self, qkv: Tensor, heads: int, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        qk = qkv[:, :heads]
        qk.copy_(
            _rotated(qk, cos, sin) if norm is None else _normed_rotated(qk, norm, eps, cos, sin)
        )

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return _swiglu(gate_up)

    def draw(self, logits: Tensor, knobs: Knobs, u: Tensor) -> tuple[Tensor, Tensor]:
        scaled, first = _scaled(logits, knobs.temperature)
        if knobs.truncated:
            truncate(scaled, knobs)
        return _drawn(scaled, first, knobs.temperature, u)
