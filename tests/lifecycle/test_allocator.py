"""What a learner and a worker make of their memory: what is freed is used again, in pages of 2 MiB."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGES_OF_A_TURN = """
import resource, sys
import numpy as np
from areal_q.system.processes import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def turn():
    blocks = [np.ones(2 << 20) for _ in range(8)]  # of 16 MiB

turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def fresh_pages(how: str) -> int:
    """Returns how many fresh pages the second of two equal turns takes."""
    command = [sys.executable, "-c", PAGES_OF_A_TURN, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_used_again():
    assert 10 * fresh_pages("kept") < fresh_pages("given back")


PAGES_OF_A_TENSOR = """
import sys
from areal_q.system.processes import use_huge_pages

if sys.argv[1] == "huge":
    import learner.__main__, rollout.__main__
    assert "torch" not in sys.modules, "torch would not know of it"
    use_huge_pages()

import torch

tensor = torch.ones(4 << 20)  # of 16 MiB
inside, at = False, tensor.data_ptr()
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        inside = first <= at < last
    elif inside and line.startswith("VmFlags"):
        print("hg" in line.split())
"""


@pytest.mark.parametrize(("how", "huge"), [("huge", "True"), ("as it comes", "False")])
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="pages of one size"
)
def test_large_tensors_lie_in_huge_pages(how: str, huge: str):
    command = [sys.executable, "-c", PAGES_OF_A_TENSOR, how]
    alone = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    assert done.stdout.strip() == huge
