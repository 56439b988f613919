"""Quantizing weights in each number format: speed beside a copy and torchao, memory, sticky scales.

    .venv-formats/bin/python -m bench.weights.quantize   # with torchao's columns (make test-formats makes it)
    python -m bench.weights.quantize                            # without

Speed is bytes of float32 weights per CPU second on one thread, the best of interleaved repetitions.
"""
# pyright: reportMissingImports=false

import time
import warnings
from collections.abc import Callable, Mapping
from unittest import mock

import torch
from torch import Tensor

from areal_q.kernels.quantize import dispatch
from areal_q.quant import FORMATS, quantize_state
from areal_q.quant.code_changes import codes_moved
from areal_q.quant.state_dict import dequantize_state, is_quantized
from areal_q.quant.sticky_scales import StickyRanges
from areal_q.weights import delta
from areal_q.weights import version as weights
from bench.common import commit, device, number, publish, say, table, versions

SIZE = 4096
REPETITIONS = 4
LAYER = {  # Qwen2.5-7B
    "self_attn.q_proj": (3584, 3584),
    "self_attn.k_proj": (512, 3584),
    "self_attn.v_proj": (512, 3584),
    "self_attn.o_proj": (3584, 3584),
    "mlp.gate_proj": (18944, 3584),
    "mlp.up_proj": (18944, 3584),
    "mlp.down_proj": (3584, 18944),
}
LAYERS, VOCABULARY, WIDTH = 28, 152064, 3584
DRIFT, STEPS, LR = 0.05, 8, 1e-5


def speeds() -> dict[str, dict[str, float]]:
    """Bytes of float32 per CPU second, by format and contestant."""
    torch.manual_seed(0)
    w = torch.randn(SIZE, SIZE) * 0.02
    out = torch.empty_like(w)
    peers = torchao_ways(w)
    result: dict[str, dict[str, float]] = {}
    for name, format in FORMATS.items():
        say(f"speed of {name}")
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda: out.copy_(w),
            "ours": lambda format=format: format.quantize(w, "w"),
            "torch": lambda format=format: plain(format, w),
        }
        if name in peers:
            ways["torchao"] = peers[name]
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(REPETITIONS):
            for way, run in ways.items():
                began = time.process_time()
                run()
                best[way] = min(best[way], time.process_time() - began)
        result[name] = {way: w.nbytes / seconds for way, seconds in best.items()}
    return result


def plain(format, w: Tensor) -> object:
    """The same format in torch operations only."""
    with mock.patch.object(dispatch, "_kernels", lambda: None):
        return format.quantize(w, "w")


def torchao_ways(w: Tensor) -> dict[str, Callable[[], object]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats.mx_tensor import to_mx
            from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
            from torchao.quantization.quant_primitives import (
                _choose_scale_float8,
                _quantize_affine_float8,
            )
    except ImportError:
        say("torchao is not installed here")
        return {}

    def fp8(block: list[int]) -> object:
        scale = _choose_scale_float8(w, block, torch.float8_e4m3fn)
        return _quantize_affine_float8(w, scale, torch.float8_e4m3fn)

    return {
        "fp8": lambda: fp8([128, 128]),
        "fp8-channel": lambda: fp8([1, SIZE]),
        "mxfp4": lambda: to_mx(w, torch.float4_e2m1fn_x2, 32),
        "nvfp4": lambda: nvfp4_quantize(w, 16, w.abs().amax() / (448 * 6)),
    }


def memory() -> dict[str, tuple[float, float]]:
    """GiB of a 7B-shaped model, and bits per weight of its linears."""
    linears = LAYERS * sum(rows * columns for rows, columns in LAYER.values())
    rest = (
        2 * (2 * VOCABULARY * WIDTH + LAYERS * 2 * WIDTH) * 8
    )  # bits: embedding, head, norms in bf16
    result = {}
    for name, format in FORMATS.items():
        parts = [format.quantize(torch.zeros(shape), "w") for shape in LAYER.values()]
        bits = 8 * LAYERS * sum(t.nbytes for each in parts for t in each.values())
        result[name] = ((bits + rest) / 8 / 2**30, bits / linears)
    return result


def stickiness() -> dict[str, list[float]]:
    """Bytes of a delta, share of moved codes and relative error, recomputed and sticky."""
    result = {}
    for name in FORMATS:
        if name == "bf16":
            continue
        say(f"sticky scales of {name}")
        result[name] = [x for drift in (0.0, DRIFT) for x in follow(name, drift)]
    return result


def follow(name: str, drift: float) -> tuple[float, float, float]:
    torch.manual_seed(0)
    state = {"model.layers.0.mlp.up_proj.weight": torch.randn(1024, 1024) * 0.02}
    policy = StickyRanges(drift) if drift else None
    before, nbytes, moved = version(state, name, 0, policy), 0, 0.0
    for step in range(1, STEPS + 1):
        state = {k: w + LR * torch.randn_like(w).sign() for k, w in state.items()}
        now = version(state, name, step, policy)
        body = delta.diff(before, now)
        nbytes += len(body) if body is not None else now.manifest.nbytes
        moved += codes_moved(before.tensors, now.tensors, name)
        before = now
    return nbytes / STEPS, moved / STEPS, normalized_error(state, before.tensors, name)


def normalized_error(
    state: Mapping[str, Tensor], published: Mapping[str, Tensor], format: str
) -> float:
    """‖Q(θ) - θ‖² / ‖θ‖² (QuRL, appendix A, eq. 14), `published` being `quantize_state(state, format)`."""
    restored = dequantize_state(published, format)
    names = [name for name in state if is_quantized(name)]
    change = sum(float((restored[n].float() - state[n].float()).square().sum()) for n in names)
    return change / sum(float(state[n].float().square().sum()) for n in names)


def version(
    state: dict[str, Tensor], name: str, step: int, policy: StickyRanges | None
) -> weights.WeightVersion:
    return weights.pack_version(
        quantize_state(state, name, policy), run="bench", epoch="e", version=step, format=name,
        uaq_scale=1.0, model={}, published_s=0.0,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    measured, sizes, sticky = speeds(), memory(), stickiness()
    rate = [
        [name, *(number(s[way] / 1e9 if way in s else None) for way in ("copy", "ours", "torchao", "torch")),
         number(s["copy"] / s["ours"])]
        for name, s in measured.items()
    ]  # fmt: skip
    gib = [[name, *(number(x) for x in row)] for name, row in sizes.items()]
    stays = [
        [name, number(a), number(d), number(100 * b), number(100 * e), number(f / c)]
        for name, (a, b, c, d, e, f) in sticky.items()
    ]
    sections = [
        f"Quantize · {device()} · commit {commit()} · {versions('torch', 'numba')}",
        f"GB of float32 weights per CPU second, one thread, {SIZE}×{SIZE}:",
        table(["format", "copy", "ours", "torchao", "plain torch", "copy / ours"], rate),
        "A model of Qwen2.5-7B's shape, the embedding and head in bf16:",
        table(["format", "GiB", "bits per linear weight"], gib),
        f"Sticky scales at {DRIFT}, updates of ±{LR:g} on weights of 0.02, mean of {STEPS} deltas:",
        table(
            ["format", "delta, bytes", "sticky", "codes moved, %", "sticky", "squared error ×"],
            stays,
        ),
    ]
    publish(
        "quantize", "\n\n".join(sections), {"speed": measured, "memory": sizes, "sticky": sticky}
    )


if __name__ == "__main__":
    main()
