"""Bytes of a version in a real RL run, in every number format: the same steps published in each.

    areal-q run configs/quickstart.toml steps=40 checkpoint.every=1 checkpoint.keep=100 name=bytes
    python -m bench.weights.run_bytes runs/bytes

Every checkpoint of RUN is published as its settings say, but for the format, and each delta to the checkpoint
before is applied and its result compared byte for byte. "Times" are below dense BF16, all tensors counted;
`rollout.unquantized` is fp32 (the quickstart's) or bf16. Prints a table, and writes it to
runs/bench/run_bytes.{md,json}.
"""

import os
import sys
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal_q.config import Run, load, override
from areal_q.models import Decoder, DecoderConfig
from areal_q.quant.registry import FORMATS
from areal_q.weights import delta
from bench.common import commit, device, publish, say, table
from learner import checkpoint
from learner.publishing.version_builder import VersionBuilder

WAYS = {"fp32": ("fp32", 0.0), "bf16": ("bf16", 0.0), "bf16, sticky scales": ("bf16", 0.05)}


def models(directory: Path) -> list[Decoder]:
    """The policy at each checkpoint, in order."""
    found = []
    for path in checkpoint.steps(directory / "checkpoints"):
        state = checkpoint.read_state(path)
        model = Decoder(DecoderConfig.from_hf(state.model))
        tensors = checkpoint.read_tensors(path, state)
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        found.append(model)
    return found


def measure(run: Run, steps: list[Decoder]) -> dict[str, float]:
    """Means over the versions that follow the first."""
    builder = VersionBuilder(run)
    base = builder.build(steps[0], 0)
    sizes, moved = [], []
    for version, model in enumerate(steps[1:], 1):
        new = builder.build(model, version)
        body = delta.diff(base, new)
        assert body is not None
        result = delta.apply(base, body, torch.empty_like(base.payload))
        assert torch.equal(result.payload, new.payload)
        sizes.append(len(body))
        moved.append(builder.codes_moved)
        base = new
    return {"whole": base.manifest.nbytes, "delta": mean(sizes), "moved": mean(moved)}


def main(directory: Path) -> None:
    run, steps = load(directory / "config.toml"), models(directory)
    dense = 2 * sum(p.numel() for p in steps[0].parameters())
    results, rows = {}, []
    for format in FORMATS:
        row: list[str] = []
        for way, (rest, sticky) in WAYS.items():
            asked = override(
                run,
                f"rollout.format={format}",
                f"rollout.unquantized={rest}",
                f"rollout.sticky_scales={sticky}",
            )
            m = results[f"{format}, {way}"] = measure(asked, steps)
            row += [f"{m['delta']:,.0f} ({dense / m['delta']:.1f})"]
            if not row[1:]:
                row = [f"{m['whole']:,}", f"{m['moved']:.2%}", *row]
        rows.append([format, *row])
        say(" | ".join(rows[-1]))
    sections = [
        f"{run.name}, {len(steps) - 1} steps · {device()} · commit {commit()}",
        f"Bytes of a delta (times below dense BF16, {dense:,} bytes), mean:",
        table(["format", "snapshot", "codes changed", *(f"rest {w}" for w in WAYS)], rows),
    ]
    publish("run_bytes", "\n\n".join(sections), results)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
