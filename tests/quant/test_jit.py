"""Compiled loops that are kept on disk."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from areal_q.quant.kernels import jit

CALLEE = """
from jit import kernel

@kernel()
def grown(x):
    return x + {step}
"""
CALLER = """
from callee import grown
from jit import kernel

@kernel()
def twice(x):
    return grown(grown(x))

print(twice(1), sum(twice.stats.cache_hits.values()))
"""


def test_a_kernel_is_compiled_again_when_one_it_calls_changes(tmp_path: Path):
    shutil.copy(jit.__file__, tmp_path)
    (tmp_path / "caller.py").write_text(CALLER)
    clean = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    for kept in ({}, {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}):
        said = []
        for step in (1, 1, 10):
            (tmp_path / "callee.py").write_text(CALLEE.format(step=step))
            command = [sys.executable, str(tmp_path / "caller.py")]
            done = subprocess.run(command, env=clean | kept, capture_output=True, text=True)
            said.append(done.stdout.split())
        assert said == [["3", "0"], ["3", "1"], ["21", "0"]], done.stderr
