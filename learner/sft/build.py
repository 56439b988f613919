"""Builds a supervised run: rows, tokenizer, policy, ranks, and where it goes on from."""

import math
import threading
from pathlib import Path

from msgspec.structs import replace

from areal_q.checks.model import check_format, check_shape, check_vocabulary
from areal_q.config import Run, Sft, dump_toml
from areal_q.models.shape import shape_of
from areal_q.observability.metrics_log import MetricsLog
from areal_q.system import run_dir
from areal_q.system.files import write_whole
from areal_q.tasks import Task, Tokenizer, build_task
from areal_q.tasks.stops import write_stops
from learner.backends.data_parallel import ALONE, Ranks
from learner.build import updater_of
from learner.build_policy import build_policy
from learner.checkpoint.async_writer import CheckpointWriter
from learner.data.validation import check_data, check_encoding
from learner.sft.stage import SupervisedRun
from learner.supervised.demonstrations import (
    Demonstrations,
    Rows,
    encoded,
    read_demonstrations,
    tokenizer_of,
)


def rows_of(run: Run) -> tuple[Run, Task | Rows]:
    """Returns `run` with the steps that its epochs are, if it names some, and the rows. Raises TaskError naming
    file and line."""
    cfg = _settings(run)
    rows = build_task(run.task) if cfg.path is None else read_demonstrations(cfg)
    return _with_steps(run, len(rows.train)), rows


def _with_steps(run: Run, rows: int) -> Run:
    """Returns `run` with the steps that its epochs over so many rows are, if it names some."""
    cfg = _settings(run)
    if not cfg.epochs:
        return run
    return replace(run, steps=max(1, math.ceil(cfg.epochs * rows / cfg.batch)))


def _settings(run: Run) -> Sft:
    assert run.sft is not None
    return run.sft


def build_supervised(
    run: Run,
    directory: Path,
    rows: Task | Rows,
    resume: bool,
    metrics: MetricsLog,
    stop: threading.Event,
    ranks: Ranks = ALONE,
) -> SupervisedRun:
    """Returns a supervised run in `directory` that is ready to train, after checks in order of their cost.
    The steps of its epochs, there and in its config.toml, are of the rows that are short enough. Raises
    ConfigError, CheckpointError or TaskError for what cannot be trained, or gone on with."""
    cfg, tokenizer = _settings(run), tokenizer_of(run)
    data = _data(run, directory, rows, tokenizer, metrics, ranks)
    if not resume and (counted := _with_steps(run, data.size)) != run:
        run = counted
        write_whole(directory / "config.toml", dump_toml(run))
    metrics.write("start", 0, {}, doing="loading the model")
    policy, state = build_policy(run, directory, resume, rows, tokenizer, metrics, stop)
    start = state.step if state else 0
    if resume:
        metrics.rewind(start)
    write_stops(directory, tokenizer.stops)
    checkpoints = CheckpointWriter(directory / "checkpoints", run.checkpoint)
    policy.readers.append(checkpoints.wait_until_read)
    return SupervisedRun(
        run=run,
        directory=directory,
        run_id=run_dir.run_id(directory, state.run_id if state else ""),
        step=start,
        data=data,
        batch=cfg.batch,
        accuracy=cfg.path is None if cfg.accuracy is None else cfg.accuracy,
        tokenizer=tokenizer,
        updater=updater_of(policy, run, ranks),
        metrics=metrics,
        checkpoints=checkpoints,
    )


def _data(
    run: Run,
    directory: Path,
    rows: Task | Rows,
    tokenizer: Tokenizer,
    metrics: MetricsLog,
    ranks: Ranks,
) -> Demonstrations:
    """Returns the rows, encoded, once it is known that the model can read them, and is learnt as is asked."""
    cfg, shape = _settings(run), shape_of(run.model, tokenizer)
    check_shape(run, shape, ranks.size, rollouts=False)
    if run.learner.lora or run.learner.precision != "full":
        check_format(shape, run.rollout.format)
    check_vocabulary(shape, tokenizer, encoded(rows.train[0], tokenizer)[0])
    check_data(directory, run.task if cfg.path is None else cfg, rows)
    check_encoding(directory, run.model, tokenizer)
    longest = min(shape.max_positions, run.learner.pass_tokens)
    data = Demonstrations(rows, tokenizer, longest, run.seed)

    def tell(done: int, of: int) -> None:
        metrics.write("start", 0, {}, doing=f"encoding: {done:,} of {of:,} rows")

    data.encode(run.eval.problems, tell)
    return data
