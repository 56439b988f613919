"""Loss and gradient of 64 responses of 4,096 tokens: ours beside verl's, areal's and trl's own functions.

One process of .venv-peers, one thread, the same float32 inputs; the sides take turns and the median of REPEATS
counts, in seconds of the CPU. Peak memory is the most that a step held at one moment beyond its inputs (saved
tensors, temporaries, the gradient), by torch's own record of every allocation, in tensors of [B, T] float32.
"alone" is our loss without its diagnostics; a peer's function includes the few metrics that it always computes.
"""

import json
import statistics
from typing import Any

from bench.common import RESULTS, number, table
from bench.shapes.peers import Peers, python_of

SEQUENCES, TOKENS, REPEATS = 64, 4096, 21
SIDES = {
    "ours": "alone",
    "ours with diagnostics": "with diagnostics",
    "verl": "verl",
    "areal": "areal",
    "trl": "trl",
}


def section() -> tuple[str, dict[str, Any]]:
    """Returns a table and its numbers: milliseconds and memory of each objective and side."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path, peers = RESULTS / "objectives.spec.json", Peers()
    spec = {"sequences": SEQUENCES, "tokens": TOKENS, "seed": 0, "repeats": REPEATS}
    path.write_text(json.dumps(spec))
    peers.ask("objectives", python_of("peers"), "bench.peers.time_losses", str(path))
    if "objectives" not in peers.found:
        return peers.closing().strip(), {"left_out": peers.left_out}
    measured = peers.found["objectives"]
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items())
    header = ["ms / peak tensors", *SIDES.values(), "fastest peer / alone"]
    return f"{versions}\n\n{table(header, rows(measured))}", measured


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
