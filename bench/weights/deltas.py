"""Bytes of one update in real training, in every number format, beside what others send.

    python -m bench.weights.training TEXT runs/bench/training     # once: about 10 minutes of CPU
    python -m bench.weights.deltas

The weights are those of bench/weights/training.py (100M parameters, float32 master weights, AdamW, next-byte
loss) before and after one step at lr 1e-6 and 1e-5; LAYERS of its 14 layers are taken. Linears are published
in the format, all other tensors in BF16. Every delta is applied, and its result compared byte for byte.

Peers: dense BF16; sparse BF16 (positions and new values of the numbers that changed, by zstd, as PULSE's
patches); zstd of the XOR of BF16, byte planes apart. "sticky": with `rollout.sticky_scales` = DRIFT, scales
stand still between steps instead of moving all together.
The last table extrapolates: bits a weight, times the weights of a larger model.
Prints tables, and writes them to runs/bench/deltas.{md,json}.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zstandard
from safetensors import safe_open
from torch import Tensor

from areal_q.quant import quantize_state
from areal_q.quant.registry import FORMATS
from areal_q.quant.state_dict import is_quantized
from areal_q.quant.sticky_scales import StickyRanges
from areal_q.weights import delta
from areal_q.weights import version as weights
from areal_q.weights.version import WeightVersion
from bench.common import RESULTS, commit, device, publish, say, table
from bench.weights.training import LEARNING_RATES

LAYERS = (0, 3, 6, 9, 12)
MODELS = {"7B (Qwen2.5)": (6.53e9, 1.09e9), "32B (Qwen2.5)": (31.2e9, 1.56e9)}
"""Weights in linears, and in embedding and head"""
DRIFT = 0.05
State = dict[str, Tensor]


def load(kind: str, lr: str) -> State:
    """The embedding, norms, and the layers taken; float32."""
    skip = {f".layers.{i}." for i in range(14) if i not in LAYERS}
    with safe_open(RESULTS / "training" / f"{kind}-{lr}.safetensors", "pt") as file:
        names = [n for n in file.keys() if not any(s in n for s in skip)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


def published(state: Mapping[str, Tensor], format: str, number: int, policy: Any) -> WeightVersion:
    tensors = quantize_state(state, format, policy)
    for name in state:
        if not is_quantized(name):
            tensors[name] = state[name].bfloat16()
    return weights.pack_version(
        tensors,
        run="bench",
        epoch="a",
        version=number,
        format=format,
        uaq_scale=1.0,
        model={},
        published_s=0.0,
    )


def codes_of(version: WeightVersion, format: str) -> np.ndarray:
    """All codes of the linears, one element each."""
    first = FORMATS[format].suffixes[0]
    parts = [
        t.reshape(-1).view(torch.uint8).numpy()
        for n, t in version.tensors.items()
        if n.endswith(f"_proj.{first}")
    ]
    raw = np.concatenate(parts)
    if "4" in format:
        return np.stack([raw & 15, raw >> 4]).reshape(-1)
    return raw.view("<u2") if format == "bf16" else raw


def measure(before: State, after: State, format: str, policy: Any = None) -> dict[str, float]:
    began = time.process_time()
    old, new = (published(s, format, i, policy) for i, s in enumerate((before, after)))
    quantized_s = (time.process_time() - began) / 2
    began = time.process_time()
    body = delta.diff(old, new)
    diffed_s = time.process_time() - began
    assert body is not None
    assert torch.equal(delta.apply(old, body, torch.empty_like(old.payload)).payload, new.payload)
    counts = delta.changed(new.manifest, body)
    scales = [c for n, c in counts.items() if "scale" in n]
    linears = sum(t.numel() for n, t in before.items() if is_quantized(n))
    rest = [n for n in before if not is_quantized(n)]
    alone = delta.diff(*(_only(v, rest) for v in (old, new)))
    total = sum(t.numel() for t in before.values())
    return {
        "bytes": len(body),
        "times": 2 * total / len(body),
        "linears_bits": 8 * (len(body) - len(alone or b"")) / linears,
        "linears_times": 2 * linears / (len(body) - len(alone or b"")),
        "rest_bits": 8 * len(alone or b"") / max(1, total - linears),
        "codes": float(np.mean(codes_of(old, format) != codes_of(new, format))),
        "scales": sum(n for n, _ in scales) / max(1, sum(of for _, of in scales)),
        "quantize_s": quantized_s,
        "diff_s": diffed_s,
    }


def _only(version: WeightVersion, names: list[str]) -> WeightVersion:
    m = version.manifest
    return weights.pack_version(
        {n: version.tensors[n] for n in names},
        run=m.run,
        epoch=m.epoch,
        version=m.version,
        format=m.format,
        uaq_scale=1.0,
        model={},
        published_s=0.0,
    )


def peers(before: State, after: State) -> dict[str, float]:
    old, new = (
        torch.cat([t.bfloat16().reshape(-1) for t in s.values()]).view(torch.uint8).numpy()
        for s in (before, after)
    )
    dense = len(old)
    xor = (old ^ new).reshape(-1, 2).T.tobytes()
    old, new = old.view("<u2"), new.view("<u2")
    where = np.flatnonzero(old != new)
    sparse = np.diff(where, prepend=-1).astype(np.uint32).tobytes() + new[where].tobytes()
    pack = zstandard.ZstdCompressor(3).compress
    return {
        "dense BF16": dense,
        "sparse BF16, zstd": len(pack(sparse)),
        "zstd of XOR of BF16": len(pack(xor)),
    }


def main() -> None:
    results: dict[str, Any] = {}
    rows = []
    for lr in LEARNING_RATES:
        before, after = load("before", lr), load("after", lr)
        others = peers(before, after)
        results[lr] = {"peers": others, "formats": {}, "sticky": {}}
        for way, nbytes in others.items():
            rows.append([lr, way, f"{others['dense BF16'] / nbytes:,.0f}", "", "", "", ""])
        for format in FORMATS:
            plain = results[lr]["formats"][format] = measure(before, after, format)
            sticky = None
            if format != "bf16":
                sticky = results[lr]["sticky"][format] = measure(
                    before, after, format, StickyRanges(DRIFT)
                )
            say(f"{lr} {format} {plain['times']:.0f} {plain['linears_times']:.0f}")
            rows.append(
                [
                    lr,
                    f"delta of {format}",
                    f"{plain['times']:,.0f}",
                    f"{plain['linears_times']:,.0f}",
                    f"{sticky['linears_times']:,.0f}" if sticky else "",
                    f"{plain['codes']:.4%}",
                    f"{plain['scales']:.1%}" if plain["scales"] else "",
                ]
            )
    larger = []
    for name, (linears, rest) in MODELS.items():
        for lr in LEARNING_RATES:
            for format in ("int8", "fp8", "int4"):
                m = results[lr]["sticky"][format]
                nbytes = (linears * m["linears_bits"] + rest * m["rest_bits"]) / 8
                dense = 2 * (linears + rest)
                larger.append(
                    [name, lr, format, f"{nbytes / 1e6:,.1f} MB", f"{dense / nbytes:,.0f}"]
                )
    header = ["lr", "way", "all ×", "linears ×", "sticky ×", "codes changed", "scales changed"]
    sections = [
        f"Deltas of real training · {device()} · commit {commit()}",
        "Times smaller than dense BF16; one Adam step of a 100M-parameter decoder:",
        table(header, rows),
        "Extrapolated, not measured (sticky scales; the rest in BF16):",
        table(["model", "lr", "format", "a step", "×"], larger),
    ]
    publish("deltas", "\n\n".join(sections), results)


if __name__ == "__main__":
    main()
