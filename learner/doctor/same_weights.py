"""The same-weights probe: a few more steps of a run at learning rate 0, with engine and buffer.

All versions then have the same weights, so that staleness has no effect whatever the lag, and the remaining gap
comes from quantization and the engine.
"""

import os
import shutil
from pathlib import Path

import msgspec
from rich.console import Console

from areal_q.config import dump_toml, override
from areal_q.errors import CheckpointError
from areal_q.runner.launcher import QuietView, launch
from areal_q.system.run_dir import recorded_settings
from buffer.redis_store import LearnerBuffer
from learner import checkpoint


def same_weights_run(directory: Path, steps: int, console: Console) -> Path:
    """Runs `steps` steps from a copy of the run's newest checkpoint in `directory/NAME-probe`, and returns that
    directory. Raises CheckpointError if there is no checkpoint, KeyboardInterrupt if the probe was killed."""
    found = checkpoint.steps(directory / "checkpoints")
    if not found:
        raise CheckpointError(f"{directory / 'checkpoints'}: no checkpoint to probe")
    start = checkpoint.read_state(found[-1]).step
    recorded = recorded_settings(directory)
    run = override(
        recorded,
        f'name="{recorded.name}-probe"',
        f'root="{directory}"',
        f"steps={start + steps}",
        "learner.optimizer.lr=0.0",
        "eval.problems=1",
        "checkpoint.keep=1000",
        "rollout.workers=1",
    )
    # AQN's noise would differ from version to version, while all are to have the same weights.
    run = msgspec.structs.replace(run, rollout=msgspec.structs.replace(run.rollout, aqn=None))
    probe = directory / run.name
    if probe.exists():
        shutil.rmtree(probe)
    probe.mkdir()
    shutil.copytree(found[-1], probe / "checkpoints" / found[-1].name)
    (probe / "config.toml").write_text(dump_toml(run))
    if url := os.environ.get("REDIS_URL"):  # an earlier probe may have been there
        buffer = LearnerBuffer(url, run.name)
        buffer.forget()
        buffer.close()
    with console.status(f"{steps} steps at learning rate 0 from step {start}"):
        if launch(run, True, lambda _: QuietView(console.print)) != 0:
            raise KeyboardInterrupt
    return probe
