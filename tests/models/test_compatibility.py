"""docs/models.md says which number formats, engines, learners and kinds of models go together: what `areal-q
check` says of a tiny model. Where it says yes, and a CPU can, the tests below run it, and those of the engines.

`PYTHONPATH=tests python tests/models/test_compatibility.py` writes the page's tables anew.
"""

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.kinds import NO_PAD, character_tokenizer, config_of, foreign_model, write_foreign
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

from areal_q.checks.automatic import has_experts, settled
from areal_q.checks.model import check_model
from areal_q.config import HfEngine, SglangEngine, TorchEngine, VllmEngine, load
from areal_q.errors import UserError
from areal_q.quant import FORMATS
from rollout.engines import ENGINES, capabilities_of
from rollout.engines.base import Capabilities
from rollout.engines.process import checkpoint_backend
from rollout.engines.sglang_backend.sglang_engine import SglangBackend
from rollout.engines.vllm_backend import cpu_kernels
from rollout.engines.vllm_backend.vllm_engine import VllmBackend

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
USUAL = ["task.digits=1", "task.heldout=20", "rollout.sampling.max_tokens=4"]
SMALL = ["model.width=256", "model.mlp=128", "model.layers=2"]
"""Widths that are whole groups and blocks of every format, as those of SHAPE"""
SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
KINDS = {
    "dense": lambda: config_of("qwen3", SHAPE),
    "gemma3_text": lambda: config_of("gemma3_text", SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "qwen3_moe, a dense layer": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[1]),
    "gpt_oss": lambda: config_of("gpt_oss", SHAPE),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, **EXPERTS, shared_expert_intermediate_size=128, **NO_PAD
    ),
    "qwen2_moe, a dense layer": lambda: config_of("qwen2_moe", SHAPE),
    "qwen2_moe, no biases": lambda: config_of("qwen2_moe, no biases", SHAPE),
    "qwen3_5_text": lambda: config_of("qwen3_5_text", SHAPE),
    "qwen3_5_moe_text": lambda: config_of("qwen3_5_moe_text", SHAPE),
    "qwen3_next": lambda: config_of("qwen3_next", SHAPE),
}
"""Models of ours"""
FIRST = "format \\ engine"
FOREIGN = "by transformers"
LEARNERS = {
    "full": (),
    "qarl": ("learner.precision=qarl",),
    "jet": ("learner.precision=jet",),
    "LoRA": ("learner.lora.rank=4",),
}
BACKENDS = ("torch", "Megatron")
MEGATRON = ("learner.backend.type=megatron",)
REPLAY = ("learner.routing_replay=true",)
BF16 = ("rollout.format=bf16",)
Words = Callable[[str, str], str]
"""(row, column) ─▶ the words with which `check` refuses the two together; "" if it does not"""


def capabilities() -> dict[str, Capabilities]:
    """What each engine that has weights can do, by where it runs."""
    found = {"torch": capabilities_of(TorchEngine()), "hf": capabilities_of(HfEngine())}
    every = frozenset(format for format, _ in cpu_kernels.KERNELS)  # not this processor's alone
    served = {"vllm": VllmBackend, "sglang": SglangBackend}
    assert {*found, *served} == ENGINES.keys() - {"scripted"}
    for place, gpu, hopper in (("CPU", 0, 0), ("GPU", 1, 0), ("Hopper", 1, 1)):
        with (
            patch.object(checkpoint_backend, "has_gpu", lambda gpu=gpu: bool(gpu)),
            patch.object(checkpoint_backend, "is_hopper", lambda hopper=hopper: bool(hopper)),
            patch.object(cpu_kernels, "FORMATS", every),
        ):
            found[f"vllm, {place}"] = VllmBackend(VllmEngine()).capabilities
            found[f"sglang, {place}"] = SglangBackend(SglangEngine()).capabilities
    del found["sglang, Hopper"]  # as on any GPU
    return {
        name: found[name] for name in sorted(found, key=lambda name: name.split(",")[0] != "torch")
    }


def refused(at: Path | None, *settings: str, able: Capabilities | None = None) -> str:
    """What `check` says of the model in directory `at`, or of a small one, with these settings, whose engine is
    `able` to do so much; by itself what the engine of the settings is here."""
    model = SMALL if at is None else [f"model={{type='pretrained', path='{at}'}}"]
    try:
        run = settled(load(None, [*USUAL, *model, *settings]))
        check_model(run)
        able = able or capabilities_of(run.rollout.engine)
    except UserError as error:
        return "; ".join(error.lines()).removeprefix("on the command line: ")
    return able.lacks(run.rollout, run.learner.routing_replay, has_experts(run)) or ""


def tables(at: Path) -> Iterable[str]:
    """Yields the page's tables. Models are written into directory `at`."""
    for kind, config in KINDS.items():
        foreign_model(config()).save_pretrained(at / kind)
        character_tokenizer().save_pretrained(at / kind)
    write_foreign(at / FOREIGN, "phi")
    able = capabilities()

    def engine(format: str, place: str) -> str:
        name = place.partition(",")[0]
        chosen = f"rollout.engine.type={name}", f"rollout.format={format}"
        if name == "hf":
            return refused(at / FOREIGN, "learner.uaq=1", *chosen, able=able[place])
        experts = ("model.experts=4",) if place.endswith("experts") else ()
        return refused(None, *chosen, *experts, able=able[place.removesuffix(", experts")])

    yield table(FIRST, FORMATS, [*able, "vllm, CPU, experts"], engine)

    def learner(format: str, kind: str) -> str:
        chosen = (f"rollout.format={format}", *LEARNERS[kind.partition(", ")[0]])
        if kind.endswith(FOREIGN):
            return refused(at / FOREIGN, "learner.uaq=1", *chosen)
        return refused(None, *chosen, *(MEGATRON if kind.endswith("Megatron") else ()))

    kinds = [f"{precision}, {backend}" for backend in BACKENDS for precision in LEARNERS]
    kinds += [f"{precision}, {FOREIGN}" for precision in LEARNERS]
    yield table("format \\ learner", FORMATS, kinds, learner)

    def model(kind: str, what: str) -> str:
        name, _, more = what.partition(", ")
        place = {"vllm": "vllm, GPU", "sglang": "sglang, GPU"}.get(name, name)
        chosen = () if name not in (*ENGINES, "hf") else (f"rollout.engine.type={name}",)
        chosen += {"Megatron": MEGATRON, "context": ("learner.backend.context=2",)}.get(name, ())
        chosen += LEARNERS.get(name, ()) + (REPLAY if more else ())
        return refused(at / kind, *BF16, "learner.uaq=1", *chosen, able=able.get(place))

    engines = ["torch", "hf", "vllm", "sglang"]
    columns = [*engines, *(f"{name}, R3" for name in engines)]
    columns += ["qarl", "LoRA", "Megatron", "context"]
    yield table("model \\ engine, learner", [*KINDS, FOREIGN], columns, model)


def table(title: str, rows: Iterable[str], columns: Iterable[str], words: Words) -> str:
    """Returns a table of what goes together, with the words for what does not below it, numbered. Names of rows
    in them are left out."""
    columns, said = list(columns), dict[str, int]()
    lines = [f"| {title} | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for row in rows:
        cells = []
        for column in columns:
            why = words(row, column).replace(f" {row} ", " … ").replace(f"'{row}'", "…")
            cells.append(f"no {said.setdefault(why, len(said) + 1)}" if why else "yes")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    notes = [f"{number}. `{why}`" for why, number in said.items()]
    return "\n".join([*lines, "", *notes])


@pytest.mark.timeout(60)
def test_the_page_says_what_check_says(tmp_path: Path) -> None:
    page = PAGE.read_text()
    for text in tables(tmp_path):
        assert text in page


if __name__ == "__main__":
    page = PAGE.read_text()
    start, end = page.index(f"| {FIRST} |"), page.index("\n## By transformers")
    with tempfile.TemporaryDirectory() as there:
        PAGE.write_text(page[:start] + "\n\n".join(tables(Path(there))) + "\n" + page[end:])
