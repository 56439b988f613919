"""What a version and its delta cost at Qwen2.5-0.5B's shape, in copies of its float32.

    python -m bench.weights.cost

LAYERS of its 24 layers, no embedding, weights of standard deviation 0.02 that a step moves by 1e-6. CPU seconds
of one thread, best of TURNS; the copy is timed in the same run. Every delta's result is compared byte for byte.
Prints a table, and writes it to runs/bench/weights_cost.{md,json}.
"""

import os
import time
from collections.abc import Callable
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal_q.quant import quantize_state
from areal_q.quant.code_changes import codes_moved
from areal_q.quant.registry import FORMATS
from areal_q.system.processes import keep_freed_memory
from areal_q.weights import delta
from areal_q.weights.version import PayloadPool, WeightVersion, pack_version
from bench.common import commit, device, number, publish, say, table

LAYERS, TURNS, STEP = 6, 3, 1e-6
WIDTH, KEYS, MLP = 896, 128, 4864
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KEYS, WIDTH),
    "self_attn.v_proj": (KEYS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
State = dict[str, torch.Tensor]
T = TypeVar("T")


def random_weights() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        f"model.layers.{layer}.{name}.weight": 0.02 * torch.randn(shape, generator=generator)
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }


def best(call: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of `call`, and its result."""
    took, result = [], call()  # the first call touches fresh memory
    for _turn in range(TURNS):
        began = time.process_time()
        call()
        took.append(time.process_time() - began)
    return min(took), result


def pack(state: State, version: int, format: str, pool: PayloadPool) -> WeightVersion:
    return pack_version(
        state, run="bench", epoch="a", version=version, format=format, uaq_scale=1.0, model={},
        published_s=0.0, pool=pool,
    )  # fmt: skip


def measure(before: State, after: State, format: str) -> dict[str, float]:
    """Seconds of each part, bytes of snapshot and delta, and the share of codes that moved."""
    pool = PayloadPool()
    old = pack(quantize_state(before, format), 0, format, pool)
    quantize_s, state = best(lambda: quantize_state(after, format))
    pack_s, new = best(lambda: pack(state, 1, format, pool))
    count_s, moved = best(lambda: codes_moved(old.tensors, new.tensors, format))
    diff_s, body = best(lambda: delta.diff(old, new))
    assert body is not None
    payload = torch.zeros_like(old.payload)
    apply_s, result = best(lambda: delta.apply(old, body, payload))
    assert torch.equal(result.payload, new.payload)
    seconds = {"quantize": quantize_s, "pack": pack_s, "count": count_s}
    seconds |= {"made": sum(seconds.values()), "delta": diff_s, "apply": apply_s}
    return seconds | {"snapshot": new.manifest.nbytes, "bytes": len(body), "moved": moved}


def main() -> None:
    keep_freed_memory()  # as a learner does
    torch.set_num_threads(1)
    before = random_weights()
    generator = torch.Generator().manual_seed(1)
    after = {
        n: w + STEP * torch.randn(w.shape, generator=generator).sign() for n, w in before.items()
    }
    flat = torch.cat([w.flatten() for w in before.values()])
    target = torch.empty_like(flat)
    results, rows = {}, []
    for format in FORMATS:
        copy_s, _ = best(lambda: [target.copy_(flat) for _ in range(5)])
        m = results[format] = measure(before, after, format) | {"copy": copy_s / 5}
        parts = [
            m[key] / m["copy"] for key in ("quantize", "pack", "count", "made", "delta", "apply")
        ]
        sizes = [f"{m['snapshot'] / 1e6:.0f}", f"{m['bytes'] / 1e6:.2f}", f"{m['moved']:.2%}"]
        rows.append([format, *map(number, parts), *sizes])
        say(" ".join(rows[-1]))
    header = [
        "format",
        "quantize",
        "pack, digests",
        "codes counted",
        "version",
        "delta",
        "applying",
    ]
    about = f"{flat.nbytes / 1e6:.0f} MB of float32, a copy {1e3 * results['int8']['copy']:.0f} ms"
    about = f"In copies: {about} · {device()} · commit {commit()}"
    header += ["snapshot MB", "delta MB", "codes moved"]
    publish("weights_cost", f"{about}\n\n{table(header, rows)}", results)


if __name__ == "__main__":
    main()
