"""The bench of three shapes, at the smallest."""

import subprocess
from dataclasses import replace

import pytest

from bench.common import ROOT
from bench.learner.memory import resident_bytes
from bench.learner.step import measured
from bench.peers.learner_step import plain
from bench.shapes import objectives
from bench.shapes.learner import BATCHES
from bench.shapes.limits import Limits
from bench.shapes.peers import OURS, Peers
from bench.shapes.run import SECTIONS
from bench.shapes.settings import Settings
from bench.shapes.shapes import SHAPES

SETTINGS = Settings(
    formats=["int8", "int4"], sequences=[8], dtypes=["auto"], peers=False, repeats=1
)
CONTESTANTS = {
    "generation": ["int8", "int4"],
    "drawing": ["temperature 0 and 1", "all of these", "reading the logits"],
    "prefill": ["int8", "int4"],
    "learner": ["ours float32", "ours bfloat16"],
}


def test_sizes_of_products_are_those_of_the_model():
    shape = SHAPES["0.6M"]
    weights = {name.split(".")[-2]: w.shape for name, w in shape.model().named_parameters()}
    q, k, v, gate, o, down = (weights[f"{x}_proj"] for x in ("q", "k", "v", "gate", "o", "down"))
    assert shape.linears["qkv"] == (q[1], q[0] + k[0] + v[0])
    assert shape.linears["gate_up"] == (gate[1], 2 * gate[0])
    assert shape.linears["o"] == (o[1], o[0])
    assert shape.linears["down"] == (down[1], down[0])


@pytest.mark.slow
@pytest.mark.timeout(120)  # bfloat16 takes many times as long where no processor multiplies it
@pytest.mark.parametrize("section", list(SECTIONS))
def test_a_section_measures_each_contestant_asked_for(section):
    shape = SHAPES["0.6M"]
    text, numbers = SECTIONS[section](shape, SETTINGS, Limits(shape))
    assert all(name in text for name in CONTESTANTS[section]) and numbers


@pytest.mark.slow
@pytest.mark.timeout(120)  # bfloat16 takes many times as long where no processor multiplies it
def test_rates_of_other_engines_stand_in_the_table(monkeypatch, tmp_path):
    python = tmp_path / ".venv-x" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho '{\"8\": 1234.5}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    monkeypatch.setenv("SGLANG_PYTHON", str(tmp_path / "missing" / "bin" / "python"))
    shape = SHAPES["0.6M"]
    text, numbers = SECTIONS["generation"](shape, replace(SETTINGS, peers=True), Limits(shape))
    assert numbers["tokens_per_cpu_s"][8]["vllm int8"] == 1234.5
    assert "sglang float32 (missing is not installed)" in text


@pytest.mark.slow
@pytest.mark.timeout(120)  # bfloat16 takes many times as long where no processor multiplies it
def test_all_learners_compute_the_same_gradient(tmp_path):
    shape = SHAPES["0.6M"]
    shape.model().save_pretrained(tmp_path)
    spec = {"model": str(tmp_path), "groups": BATCHES["0.6M"].drawn(64), "lr": 1e-5, "steps": 1}
    spec |= {"dtype": "float32", "microbatch": 64, "tokens": BATCHES["0.6M"].tokens}
    assert measured(spec)["norms"] == pytest.approx(plain(spec)["norms"], rel=1e-4)


def test_a_contestant_that_crashes_is_left_out_and_named(tmp_path):
    peers = Peers()
    peers.ask("crashing", OURS, "bench.no_such_module")
    peers.ask("missing", tmp_path / ".venv-x" / "bin" / "python", "bench.common")
    assert not peers.found
    assert "No module named bench.no_such_module" in peers.left_out["crashing"]
    assert "missing (.venv-x is not installed)" in peers.closing()


def test_an_answer_is_found_among_what_a_contestant_logs(tmp_path):
    peers, program = Peers(), tmp_path / "python"
    for name, output in (("chatty", '{"seconds": 2}\nINFO ended'), ("silent", "INFO ended")):
        program.write_text(f"#!/bin/sh\necho '{output}'\n")
        program.chmod(0o755)
        peers.ask(name, program, "any")
    assert peers.found == {"chatty": {"seconds": 2}}
    assert "silent (exit 0" in peers.closing()


def test_a_missing_environment_leaves_the_objectives_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PEERS_PYTHON", str(tmp_path / ".venv-x" / "bin" / "python"))
    monkeypatch.setattr(objectives, "RESULTS", tmp_path)
    text, numbers = objectives.section()
    assert text == "Left out: objectives (.venv-x is not installed)." and numbers["left_out"]


def test_peak_memory_does_not_begin_with_the_parents():
    held = bytearray(512 << 20)
    code = "from bench.learner.memory import resident_bytes as r; print(r(), r(peak=True))"
    out = subprocess.run([OURS, "-c", code], cwd=ROOT, capture_output=True, check=True).stdout
    now, peak = map(int, out.split())
    assert now <= peak < now + len(held) // 2 and resident_bytes() > len(held)
