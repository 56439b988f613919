"""python -m bench.shapes [--shapes 0.6M,0.5B] [--sections generation,learner] [--formats int8,int4] ...

Everything is random and made here. All runs on one thread and is measured in seconds of CPU, since the machine
may be shared; the best of --repeats counts. Beside each number stands what the processor itself can do in the
same run. Peers are transformers, and those of .venv-vllm, .venv-sglang and .venv-peers (TRL, verl, areal)
or of the interpreters that VLLM_PYTHON, SGLANG_PYTHON and PEERS_PYTHON name; one that is missing or crashes is
left out by name. Writes runs/bench/shapes.{md,json}.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from areal_q.quant import FORMATS
from bench.common import commit, device, number, publish, use_cores, versions
from bench.shapes import drawing, generation, learner, objectives, prefill
from bench.shapes.limits import Limits, copy_bytes_per_s
from bench.shapes.settings import Settings
from bench.shapes.shapes import SHAPES

SECTIONS = {
    "generation": generation.section,
    "drawing": drawing.section,
    "prefill": prefill.section,
    "learner": learner.section,
}
"""Functions (shape, settings, limits) → (Markdown, numbers)"""
WITHOUT_MODEL = {"objectives": objectives.section}
"""Functions () → (Markdown, numbers)"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.shapes", description=__doc__)

    def names(option: str, known: list[str]) -> None:
        parser.add_argument(option, default=",".join(known), metavar=",".join(known))

    names("--shapes", list(SHAPES))
    names("--sections", [*SECTIONS, *WITHOUT_MODEL])
    names("--formats", list(FORMATS))
    names("--sequences", ["16", "64"])
    parser.add_argument(
        "--dtypes", default="auto", help="of the engine: auto, float32, bfloat16, int8"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true", help="leave other projects out")
    args = parser.parse_args()
    settings = Settings(
        formats=args.formats.split(","),
        sequences=[int(n) for n in args.sequences.split(",")],
        dtypes=args.dtypes.split(","),
        peers=not args.no_peers,
        repeats=args.repeats,
    )
    use_cores(1)
    torch.set_num_threads(1)
    run(args.shapes.split(","), args.sections.split(","), settings)


def run(shapes: list[str], sections: list[str], settings: Settings) -> None:
    facts = {"device": device(), "commit": commit(), **versions("torch", "transformers")}
    facts["load"] = f"{os.getloadavg()[0]:.0f}"
    facts["copy"] = f"{number(copy_bytes_per_s() / 1e9)} GB/s"
    lines, values = [", ".join(f"{k} {v}" for k, v in facts.items())], {"facts": facts}
    for section in set(WITHOUT_MODEL) & set(sections):
        text, values[section] = WITHOUT_MODEL[section]()
        lines += ["", text]
    for name in shapes if set(SECTIONS) & set(sections) else []:
        shape = SHAPES[name]
        limits, found = Limits(shape), dict[str, Any]()
        for section in [s for s in sections if s in SECTIONS]:
            text, found[section] = SECTIONS[section](shape, settings, limits)
            lines += ["", text]
        lines += ["", limits.table(settings.sequences)]
        values[name] = found
    publish("shapes", "\n".join(lines), values)
