"""The learner's allocator: freed memory is used again."""

import subprocess
import sys

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
