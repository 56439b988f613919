"""What every peer of bench/buffer.py is given: the same arrays, the same timing; needs numpy alone.

A group is G responses of T tokens: ids int32 [G, T], log-probs float32 [G, T], mask uint8 [G, T].
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FIELDS = ("response_ids", "behavior_logprobs", "loss_mask")


def arguments() -> tuple[int, int, int, Path]:
    """(tokens, responses, groups, directory) from the command line."""
    tokens, responses, groups = map(int, sys.argv[1:4])
    return tokens, responses, groups, Path(sys.argv[4])


def make_group(number: int, tokens: int, responses: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    shape = (responses, tokens)
    return {
        "response_ids": rng.integers(0, 150_000, shape, dtype=np.int32),
        "behavior_logprobs": -rng.random(shape, dtype=np.float32),
        "loss_mask": np.ones(shape, np.uint8),
    }


def nbytes_of(group: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in group.values())


def timed(call: Callable[[Any], Any], items: Iterator[Any] | list[Any]) -> list[float]:
    """Seconds that each call took."""
    times = []
    for item in items:
        began = time.perf_counter()
        call(item)
        times.append(time.perf_counter() - began)
    return times


def summary(times: list[float]) -> tuple[float, float]:
    """(sum, p99) in seconds."""
    return sum(times), float(np.percentile(times, 99))


def resident_bytes(pid: int | None = None) -> int:
    """Anonymous and shared memory of a process and all its descendants."""
    pid = pid or os.getpid()
    total, queue = 0, [pid]
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
            except OSError:
                continue
    while queue:
        one = queue.pop()
        queue += children.get(one, [])
        try:
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def report(**values: Any) -> None:
    print("RESULT " + json.dumps(values), flush=True)
