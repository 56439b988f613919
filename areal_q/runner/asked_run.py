"""The run that a command is to begin, or to go on with."""

from pathlib import Path

from areal_q.config import Run, load
from areal_q.errors import ConfigError
from areal_q.system import run_dir


def asked_for(
    config: str | None,
    overrides: list[str],
    resume: bool,
    name: str | None,
    step: int | None = None,
) -> Run:
    """Returns the settings of the run that a command is to begin, or to go on with, from the checkpoint of
    `step` if it is not None. Raises ConfigError, and CheckpointError if there is nothing to go on with."""
    named = [*overrides, f'name="{name}"'] if name else overrides
    path = Path(config) if config else None
    if not resume:
        if step is not None:
            raise ConfigError("run: --from goes with --resume")
        if path is None:
            raise ConfigError("run: a CONFIG is needed, such as quickstart")
        if path.is_dir():
            return load(path / "config.toml", named)
        return load(path, named)
    if path is None:
        path = Path("runs", name) if name else run_dir.newest(Path("runs"))
    elif not path.is_dir():
        path = run_dir.path_of(load(path, named))
    return run_dir.resumed(path, overrides, step)
