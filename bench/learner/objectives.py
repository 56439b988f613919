"""Loss and gradient of 64 responses of 4,096 tokens: ours beside verl's, areal's and trl's own functions.

    make .venv-peers/.installed && python -m bench.learner.objectives

One process, one thread, the same float32 inputs; the sides take turns and the median of REPEATS counts, in
seconds of the CPU. Peak memory is the most that a step held at one moment beyond its inputs (saved tensors,
temporaries, the gradient), by torch's own record of every allocation, in tensors of [B, T] float32. "alone" is
our loss without its diagnostics; a peer's function includes the few metrics that it always computes.
Prints a table, and writes it to runs/bench/objectives.{md,json}.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from bench.common import ROOT, commit, device, number, peer_env, publish, say, table, use_cores

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SEQUENCES, TOKENS, REPEATS = 64, 4096, 21
SIDES = {
    "ours": "alone",
    "ours with diagnostics": "with diagnostics",
    "verl": "verl",
    "areal": "areal",
    "trl": "trl",
}


def measure() -> dict[str, Any]:
    if not PYTHON.exists():
        sys.exit("the peers are not installed: make .venv-peers/.installed")
    spec = ROOT / "runs" / "bench" / "objectives.spec.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(
        json.dumps({"sequences": SEQUENCES, "tokens": TOKENS, "seed": 0, "repeats": REPEATS})
    )
    argv = [str(PYTHON), "-m", "bench.peers.time_losses", str(spec)]
    done = subprocess.run(argv, cwd=ROOT, env=peer_env(1), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def rows(measured: dict[str, Any]) -> list[list[str]]:
    """Milliseconds and, after the slash, peak memory; last the fastest peer's time over ours."""
    out = []
    for objective, sides in measured["rows"].items():
        ms = {side: statistics.median(found["cpu_ms"]) for side, found in sides.items()}
        cells = [
            f"{number(ms[side])} / {number(sides[side]['peak_bytes'] / (4 * SEQUENCES * TOKENS))}"
            if side in sides
            else "–"
            for side in SIDES
        ]
        peers = [t for side, t in ms.items() if not side.startswith("ours")]
        ratio = number(min(peers) / ms["ours"]) if peers else "–"
        out.append([objective, *cells, ratio])
    return out


def main() -> None:
    use_cores(1)
    say("objectives")
    measured = measure()
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items())
    header = ["ms / peak tensors", *SIDES.values(), "fastest peer / alone"]
    text = f"{device()}, commit {commit()}; {versions}\n\n" + table(header, rows(measured))
    publish("objectives", text, measured)


if __name__ == "__main__":
    main()
