"""The same-weights probe: a few more steps of a run at learning rate 0, through engine and buffer.

All versions then hold the same weights, so staleness is 0 whatever the lag: what is left of the gap is
quantization and the engine.
"""

import shutil
from pathlib import Path

from areal_q.config import dump_toml, override
from areal_q.errors import CheckpointError
from areal_q.launch import launch
from areal_q.live import build_view
from learner import checkpoint
from learner.replay_steps import recorded_settings

NAME = "probe"


def same_weights_run(directory: Path, steps: int) -> Path:
    """Resumes a copy of the run's newest checkpoint in `directory/probe`; returns that directory.

    Raises CheckpointError where there is no checkpoint.
    """
    found = checkpoint.steps(directory / "checkpoints")
    if not found:
        raise CheckpointError(f"{directory / 'checkpoints'}: no checkpoint to probe")
    start = checkpoint.read_state(found[-1]).step
    run = override(
        recorded_settings(directory),
        f'name="{NAME}"',
        f'root="{directory}"',
        f"steps={start + steps}",
        "learner.optimizer.lr=0.0",
        "eval.problems=1",
        "rollout.workers=1",
    )
    probe = directory / NAME
    if probe.exists():
        shutil.rmtree(probe)
    probe.mkdir()
    shutil.copytree(found[-1], probe / "checkpoints" / found[-1].name)
    (probe / "config.toml").write_text(dump_toml(run))
    launch(run, True, build_view(run))
    return probe
