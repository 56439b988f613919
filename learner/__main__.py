"""`python -m learner` runs the learner as a process of its own.

    --config CONFIG [a.b=c]...   as a service, which resumes if the run's directory has a checkpoint
    --run-dir DIR [--resume]     under a launcher, which has prepared and locked DIR

With torchrun in place of python (`-m torch.distributed.run --nproc-per-node N -m learner …`) the model is
sharded over N processes; the first does all that is described here, the others follow it.

At SIGTERM or SIGINT the current step ends, a checkpoint is written, and the exit code is 143 or 130
(areal_q/system/stop_request.py), or 0 if that was the last step. Exit code 2 means that a setting, file or
checkpoint cannot be used, which one line on stderr names.
"""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Argument, Option

from areal_q.checks.automatic import settled, why_dtype, why_smoothing
from areal_q.checks.disk_use import check_room, still_to_write
from areal_q.checks.hub import fetched
from areal_q.config import Run, load
from areal_q.errors import BufferGone, ConfigError, Stopped
from areal_q.observability import service_log
from areal_q.observability.metric_table import METRICS
from areal_q.observability.progress import ProgressLog
from areal_q.observability.prometheus_exporter import Exporter, serve_metrics
from areal_q.system import run_dir as rundir
from areal_q.system.command import MetricsPort, RedisUrl, WatchdogSeconds, run_command
from areal_q.system.ports import allow_open_files
from areal_q.system.processes import keep_freed_memory, use_huge_pages
from areal_q.system.stop_request import StopRequest
from areal_q.system.watchdog import watched

if TYPE_CHECKING:
    from learner.loop import Learner

logger = logging.getLogger("learner")
ANNOUNCE, FETCH = "tcp://127.0.0.1:5551", "tcp://127.0.0.1:5552"
"""The default ZeroMQ endpoints. Their ports are fixed, so that workers find a restarted learner again."""

LEARNER_EXIT_CODES = (
    "Exit codes: 0 the run is finished; 143 ended by SIGTERM, 130 by SIGINT, with a checkpoint to go on "
    "from; 75 ended by its own watchdog; 2 a setting, file or checkpoint that cannot be used, which one line "
    "names; 1 a crash."
)


def main(
    redis: RedisUrl,
    overrides: Annotated[
        list[str] | None, Argument(metavar="a.b=c", help="settings on top of --config")
    ] = None,
    config: Annotated[Path | None, Option(help="a TOML file; everything is written to its root/name")] = None,
    run_dir: Annotated[Path | None, Option(help="holds config.toml; everything is written here")] = None,
    announce: Annotated[str, Option(help="ZeroMQ endpoint to announce versions on, before the settings'")] = "",
    fetch: Annotated[str, Option(help="ZeroMQ endpoint to serve weights on, before the settings'")] = "",
    resume: Annotated[
        bool, Option(help="go on from the newest checkpoint; --config does so by itself")
    ] = False,
    metrics: MetricsPort = "",
    watchdog: WatchdogSeconds = 0.0,
) -> None:  # fmt: skip
    """Learns until the last step, then exports the model in Hugging Face layout."""
    service_log.set_up("learner")
    allow_open_files()
    keep_freed_memory()
    use_huge_pages()
    stop = StopRequest()
    stop.listen()
    if (config is None) == (run_dir is None) or (run_dir and overrides):
        raise ConfigError("either --config CONFIG [a.b=c]... or --run-dir DIR is needed")
    if os.environ.get("RANK", "0") != "0":  # torchrun's other processes
        with stop.left_to_rank_0():
            run = load(config or f"{run_dir}/config.toml", overrides)
        from learner.multi_process import follow_and_exit

        follow_and_exit(run, stop)
    with _claimed(config, overrides or [], run_dir, resume) as (run, directory, resume):
        announce = announce or run.broadcast.announce or ANNOUNCE
        fetch = fetch or run.broadcast.fetch or FETCH
        code = _learn(run, directory, redis, announce, fetch, resume, stop, metrics, watchdog)
    from learner.build import leave

    leave(run, code)


@contextmanager
def _claimed(
    config: Path | None, overrides: list[str], run_dir: Path | None, resume: bool
) -> Iterator[tuple[Run, Path, bool]]:
    """Yields (settings, the run's directory, True to resume). As a service it locks the directory meanwhile."""
    if run_dir is not None:
        yield load(run_dir / "config.toml"), run_dir, resume
        return
    run = msgspec.structs.replace(load(config, overrides), sft=None)  # of a command of its own
    again = rundir.resumes(run, fetched)
    run, resume = again or settled(fetched(run)), again is not None
    with rundir.claimed(run, resume) as (directory, moved):
        if moved:
            logger.info("an earlier run without a checkpoint was in %s: now %s", directory, moved)
        logger.info("%s in %s", "resuming" if resume else "starting", directory)
        yield load(directory / "config.toml"), directory, resume


def _learn(
    run: Run,
    directory: Path,
    redis: str,
    announce: str,
    fetch: str,
    resume: bool,
    stop: StopRequest,
    metrics: str,
    watchdog: float,
) -> int:
    """Trains to the end or until `stop`, and returns the exit code."""
    exporter = _exporter(run, directory, redis, metrics)
    # torch takes seconds to import; by now a signal during the import finds its handler.
    from learner.build import build_learner, ends_other_ranks, ranks_of

    if stop.is_set():
        return stop.exit_code
    ranks, progress = ranks_of(run), watched(watchdog)
    try:
        with ends_other_ranks(ranks):
            learner = build_learner(
                run, directory, redis, announce, fetch, resume, stop, ranks, progress
            )
    except (Stopped, BufferGone) as stopped:
        logger.info("stopped: %s", stopped)
        return stop.exit_code
    gc.freeze()  # What exists now stays: looking through it again took 14 ms of a step of the quickstart.
    exporter.progress = progress
    return 0 if _train(learner, directory, exporter, stop) else stop.exit_code


def _exporter(run: Run, directory: Path, redis: str, metrics: str) -> Exporter:
    """Says what was chosen for the settings, checks that the disk has room, and returns the exporter of
    Prometheus' metrics, which are served at `metrics` from now on."""
    logger.info(why_dtype(run))
    check_room(run, directory)
    if smoothing := why_smoothing(run):
        logger.info(smoothing)
    exporter = Exporter(METRICS, {"run": run.name})
    if metrics:
        from learner.measure.vitals import Vitals

        logger.info("metrics on port %d", serve_metrics(metrics, exporter))
        ahead = partial(still_to_write, run, directory)
        Vitals(redis, run.name, directory, ahead, exporter.update).start()
    return exporter


def _train(learner: "Learner", directory: Path, exporter: Exporter, stop: StopRequest) -> bool:
    """Trains, exports the model and closes the learner. Returns True if the run is done."""
    from buffer.redis_store.keys import WORKER_TTL_S
    from learner.data.invalid_rewards import NeverScored, and_how
    from learner.final_export import finish

    log = ProgressLog(learner.run, directory, logger.info)
    learner.metrics.also("Prometheus", exporter.update)
    learner.metrics.also("log", log.add)
    learner.metrics.also("faults", lambda _: exporter.update(log.lasting_faults()))
    try:
        finished = finish(learner, directory, learner.train(stop))
    except NeverScored as error:
        raise and_how(error, learner.buffer.workers, WORKER_TTL_S) from error
    finally:
        learner.close()
    if finished:
        exporter.update({"run/ended": 1.0})
        exporter.wait_until_read(stop)
    return finished


if __name__ == "__main__":
    run_command("learner", main, LEARNER_EXIT_CODES, who="learner")
