"""`areal-q sft CONFIG` trains on conversations, or on prompts and answers, before RL or without it.

    areal-q sft chats.toml                                             # writes runs/NAME-sft
    areal-q run chats.toml model.path=runs/NAME-sft/hf                 # and on from there by RL
    python -m areal_q.system.torchrun --nproc-per-node 2 -m areal_q sft chats.toml   # over two processes

The learner is that of RL, without Redis and workers.
"""

import logging
import os
import signal
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

from msgspec.structs import replace
from typer import Argument, Option

from areal_q.checks.automatic import settled, why_dtype, why_rate
from areal_q.checks.hub import fetched
from areal_q.config import Run, Sft, load
from areal_q.errors import CheckpointError, ConfigError
from areal_q.observability.metrics_log import MetricsLog
from areal_q.runner.asked_run import asked_for
from areal_q.runner.live_view import build_view
from areal_q.system import run_dir
from areal_q.system.processes import command_began
from areal_q.system.stop_request import StopRequest

EXITS = (
    "Exit codes: 0 done, or stopped by Ctrl-C with a checkpoint; 143 so stopped by SIGTERM; 2 something to "
    "mend, which one line names."
)

CONFIG = "a TOML file, the name of a configuration that comes with areal-q, or a run's directory"


def main(
    config: Annotated[str, Argument(metavar="CONFIG", help=CONFIG)],
    overrides: Annotated[
        list[str] | None, Argument(metavar="a.b=c", help="settings on top, such as sft.batch=64")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="go on from the newest checkpoint")] = False,
    name: Annotated[
        str | None, Option(help="name of the run; default: CONFIG's own and -sft")
    ] = None,
) -> None:
    """Train on conversations or answers, with the learner of RL: packing, optimizer, checkpoints, backends.

    What is learnt, and how, is the table [sft] of CONFIG. The model is in the run's hf/, where model.path of a
    run of RL finds it.
    """
    logging.basicConfig(level=logging.WARNING, format="areal-q sft: %(message)s")
    stop = StopRequest()
    stop.listen()
    if name is None and not Path(config).is_dir():
        name = f"{load(config, overrides or []).name}-sft"
    follows = os.environ.get("RANK", "0") != "0"
    with stop.left_to_rank_0() if follows else nullcontext():
        try:
            run = asked_for(config, overrides or [], resume, name)
        except CheckpointError:
            if not follows:
                raise
            run = asked_for(config, overrides or [], False, name)  # the run is on rank 0's host
    if resume and not follows and run.sft is None:
        raise ConfigError(
            f"{run_dir.path_of(run)}: no supervised run; go on with areal-q run --resume"
        )
    from learner.supervised.supervised_step import supervised

    run = supervised(run if run.sft else replace(run, sft=Sft()))
    if follows:
        from learner.multi_process import follow_and_exit

        follow_and_exit(run, stop)
    _train(run, resume, stop)


def _train(run: Run, resume: bool, stop: StopRequest) -> NoReturn:
    """Trains, shows the run meanwhile, and ends this process."""
    from learner.arithmetic import set_arithmetic
    from learner.build import ends_other_ranks, leave, ranks_of
    from learner.sft.build import build_supervised, rows_of

    run = settled(fetched(run))
    set_arithmetic(run.learner.threads, run.learner.device)
    ranks = ranks_of(run)  # before all that takes long: the others do not wait for ever
    with ExitStack() as claimed:
        with ends_other_ranks(ranks):
            counted, rows = rows_of(run)
            run = run if resume else counted
            directory, moved = claimed.enter_context(run_dir.claimed(run, resume))
        view = build_view(run)
        run = load(directory / "config.toml")
        if moved:
            view.note(f"an earlier run was in {directory}: moved to {moved}")
        view.start(directory)
        for said in filter(None, (why_dtype(run), why_rate(run))):
            view.note(said)
        metrics = MetricsLog(directory, began=command_began())
        metrics.also("view", lambda _: view.refresh())
        try:
            with ends_other_ranks(ranks):
                training = build_supervised(run, directory, rows, resume, metrics, stop, ranks)
            if training.run.steps != run.steps:
                rows_left = f"the {training.data.size} rows that are short enough"
                view.note(f"sft.epochs are {training.run.steps} steps, those of {rows_left}")
            run = view.run = view.history.run = training.run
            with closing(training):
                done = training.train(stop)
        finally:
            metrics.close()
            view.stop()
    view.finish()
    leave(run, 0 if done or stop.number == signal.SIGINT else stop.exit_code)
