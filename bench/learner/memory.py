"""How much memory a piece of work needs: by torch's own record of every allocation, and by the system's."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that `work` held at one moment beyond what there was before it."""
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as recorded:
        work()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, held)
    return peak


def resident_bytes(*, peak: bool = False) -> int:
    """Returns the memory that this process has, or the most that it had.

    `ru_maxrss` would not do: a child's begins at what its parent had when it started it.
    """
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
