"""The GPU's bench, rehearsed on a CPU: every section runs, and what fails is a line of the table."""

import json
import subprocess
import sys

import pytest
import torch

from bench.common import ROOT
from bench.gpu import run
from bench.gpu.sections import SECTIONS


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("learner", "runs") else [])
        for name in SECTIONS
        if name != "vllm"
    ],
)
def test_a_section_measures_every_row(section):
    rows = list(SECTIONS[section](torch.device("cpu"), True))
    assert {row.name for row in rows if row.values}
    assert all(row.values or row.note for row in rows)
    for row in rows:
        assert all(value >= 0 for value in row.values.values()), row
    if section == "bits":
        assert all(row.values["codes"] == row.values["scales"] == 1 for row in rows)


def test_it_ends_with_a_table_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bench.common.RESULTS", tmp_path)
    argv = ["gpu", "--device", "cpu", "--small", "--sections", "gemm"]
    monkeypatch.setattr(sys, "argv", argv)
    run.main()
    assert "| bfloat16 256×256×256 " in capsys.readouterr().out
    names = [row["name"] for row in json.loads((tmp_path / "gpu.json").read_text())["gemm"]]
    assert "emulated 128×128 256×256×256" in names


def test_a_section_that_fails_is_said_so(monkeypatch):
    rows = run.run("gemm", "no such device", small=True)
    assert isinstance(rows, list) and [row.name for row in rows] == ["failed"]
    assert "no such device" in rows[0].note
    monkeypatch.setitem(run.LIMITS_S, "gemm", 0.01)
    assert run.run("gemm", "cpu", small=True) == "not done within 0.01 s"
    assert run.shown("gemm", "not done").endswith("not done")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    env = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "WHEELS": "none"}
    done = subprocess.run([ROOT / "bench" / "gpu.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "torch sees no GPU here" in done.stderr
