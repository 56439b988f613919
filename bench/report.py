"""What it costs to log tokens and to draw a report, on a run of one's own.

    areal-q run configs/quickstart.toml && python -m bench.report runs/quickstart

CPU seconds on one thread. The learner's step with and without the recorder on the same groups, in turns,
medians; the report as a file beside plain pyarrow that decodes every column of both logs, which is what reading
them costs at least; one served group. Prints a table, and writes it to runs/bench/report.{md,json}.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import torch

from areal_q.config import Run
from areal_q.system.run_dir import recorded_settings
from areal_q.tasks import build_tokenizer
from bench.common import commit, device, number, publish, table, use_cores, versions
from buffer.logs.trajectory_log import iter_log
from buffer.report.page import whole_file
from buffer.report.runs import Reported, read_runs
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_model
from learner.data.packing import samples_of
from learner.data.staleness import VersionHistory
from learner.measure.token_recorder import TokenRecorder
from learner.policy_update import update_policy

STEPS = 20
REPEATS = 3
GROUPS = 40
MAX_BYTES = 10_000_000


def main(directory: Path) -> None:
    use_cores(1)
    torch.set_num_threads(1)
    plain, tapped = steps(directory)
    read = best(lambda: read_plainly(directory))
    drawn = best(lambda: whole_file(read_runs([directory]), MAX_BYTES))
    run = read_runs([directory])[0]
    group = one_group(run)
    sizes = {name: size(directory / name) for name in ("trajectories", "tokens")}
    count = run.index.num_trajectories
    rows = [
        ("step with the token recorder, s", number(tapped), number(plain), f"{tapped / plain:.3f}"),
        ("report as a file, s", number(drawn), number(read), f"{drawn / read:.1f}"),
        ("one group, in a step not read before, ms", number(group * 1e3), "", ""),
        (
            "log, bytes a trajectory",
            number(sizes["tokens"] / count),
            number(sizes["trajectories"] / count),
            f"{sizes['tokens'] / sizes['trajectories']:.2f}",
        ),
    ]
    head = f"{count:,} trajectories; {device()}, commit {commit()}, {versions('pyarrow', 'torch')}"
    text = table(("", "ours", "without; plain pyarrow; trajectory log", "ratio"), rows)
    values = {"plain_s": plain, "tapped_s": tapped, "read_s": read, "drawn_s": drawn}
    publish("report", f"{head}\n\n{text}", values | {"group_s": group, "bytes": sizes})


def steps(directory: Path) -> tuple[float, float]:
    """Median CPU seconds of a step, (without, with) the recorder."""
    run = recorded_settings(directory)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    policies = {recording: build(run) for recording in seconds}
    for step, groups in iter_log(directory / "trajectories", 0, STEPS):
        samples = samples_of(SampledGroups(groups), run.learner.advantage, VersionHistory(4), step)
        for recording in (True, False) if step % 2 else (False, True):
            began = time.process_time()
            policy = policies[recording]
            recorder = TokenRecorder() if recording else None
            update_policy(policy, samples, recorder)
            if recorder:
                recorder.scores()
            seconds[recording].append(time.process_time() - began)
    return statistics.median(seconds[False]), statistics.median(seconds[True])


def build(run: Run) -> TorchPolicy:
    model = build_model(run.model, build_tokenizer(run.model, run.task), run.seed)
    return TorchPolicy(model, run.learner, run.rollout.sampling.temperature)


def best(work: Callable[[], object]) -> float:
    out = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        out.append(time.process_time() - began)
    return min(out)


def read_plainly(directory: Path) -> int:
    paths = sorted(directory.glob("t*/part-*.parquet"))
    return sum(pq.read_table(path, use_threads=False).num_rows for path in paths)


def one_group(run: Reported) -> float:
    """Median CPU seconds of a group, each in another step."""
    out = []
    for step in sorted(run.index.steps)[:GROUPS]:
        began = time.process_time()
        run.groups.chunk(step, 0, 1)
        out.append(time.process_time() - began)
    return statistics.median(out)


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("part-*.parquet"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
