"""The Triton kernels compiled for the GPUs that they are for, which takes none: what the machine code tells.

`make test-formats` runs this; without Triton, or under its interpreter, the file is skipped.
"""
# pyright: reportMissingImports=false

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.kinds import E4M3

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip(
        "needs Triton's compiler, not its interpreter: make test-formats", allow_module_level=True
    )
pytest.importorskip(
    "triton", reason="Triton is not installed: make test-formats", exc_type=ImportError
)
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from areal_q.kernels.quantize import gpu_triton

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]
DISASSEMBLER = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
ROWS = [896, 3584, 4864, 18944, 28672]
"""Inputs of the linears of Qwen2.5's 0.5B to 72B"""


@pytest.fixture(params=[90, 100], ids=["Hopper", "Blackwell"])
def instructions(request, monkeypatch, tmp_path):
    """Compiles what a call would launch, for the arguments that it has; then counts loads and stores."""

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", request.param, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Driver())
    compiled = []

    def instead_of_launching(kernel, grid):
        return lambda *a, **k: compiled.append(kernel.run(*a, grid=grid, warmup=True, **k))

    monkeypatch.setattr(JITFunction, "__getitem__", instead_of_launching)

    def count(call, *args) -> Counter[str]:
        call(*args)
        binary = tmp_path / "kernel.cubin"
        binary.write_bytes(compiled.pop().asm["cubin"])
        code = subprocess.run(
            [DISASSEMBLER, "-sass", binary], capture_output=True, text=True, check=True
        )
        return Counter(re.findall(r"\b(?:LDG|STG|LDL|STL)\b[.\w]*", code.stdout))

    return count


def assert_streams(found: Counter[str]) -> None:
    """Weights are read 16 bytes at a time, and nothing leaves the registers."""
    assert found["LDG.E.128"] >= 4, found
    assert not [name for name in found if name.startswith(("LDL", "STL"))], found


@pytest.mark.parametrize("columns", ROWS)
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_rows_are_streamed(instructions, columns, dtype):
    weight = torch.zeros(8, columns)
    found = instructions(gpu_triton.quantize, weight, dtype, (1, columns), None)
    assert_streams(found)
    assert found["STG.E.128"], found  # 16 codes at a time


def test_blocks_are_streamed(instructions):
    weight, ranges = torch.zeros(256, 3584), torch.ones(2, 28)
    assert_streams(instructions(gpu_triton.quantize, weight, E4M3, (128, 128), ranges))


@pytest.mark.parametrize(("dtype", "width"), [(torch.int8, 3584), (E4M3, 3584), (E4M3, 128)])
def test_activations_are_streamed(instructions, dtype, width):
    x = torch.zeros(256, 3584)
    assert_streams(instructions(gpu_triton.activations, x, dtype, width, 0.0, 1e-38))


@pytest.mark.parametrize(
    ("kind", "width"), [("int4", 128), ("e2m1", 16), ("e2m1", 32), ("nf4", 64)]
)
def test_four_bits_are_streamed(instructions, kind, width):
    weight = torch.zeros(56 * 256, 64) if kind == "nf4" else torch.zeros(256, 3584)
    assert_streams(instructions(gpu_triton.ranges, weight, width))
    scales, row_bytes = torch.ones(len(weight), weight.shape[1] // width), weight.shape[1] // 2
    found = instructions(
        gpu_triton.nibbles, weight, scales, width, row_bytes, kind, torch.zeros(15)
    )
    assert_streams(found)
