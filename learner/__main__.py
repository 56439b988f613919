"""`python -m learner`: the learner as a process of its own.

SIGTERM or SIGINT: the current step ends, a checkpoint is written, exit 0. Exit 2: a setting, file or
checkpoint cannot be used (one line on stderr).
"""

import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from areal_q.config import load
from areal_q.errors import Stopped, UserError

logger = logging.getLogger("learner")


def main(
    redis: Annotated[str, typer.Option(help="URL of the buffer", envvar="REDIS_URL")],
    run_dir: Annotated[Path, typer.Option(help="holds config.toml; everything is written here")],
    announce: Annotated[str, typer.Option(help="ZeroMQ endpoint to announce versions on")],
    fetch: Annotated[str, typer.Option(help="ZeroMQ endpoint to serve weights on")],
    resume: Annotated[bool, typer.Option(help="go on from the newest checkpoint")] = False,
) -> None:
    """Learns until the last step, then exports the model in Hugging Face layout."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    # torch and all that needs it only now, so that a signal during the import finds its handler.
    from learner.build import build_learner
    from learner.finish import finish

    run = load(run_dir / "config.toml")
    try:
        learner = build_learner(run, run_dir, redis, announce, fetch, resume, stop)
    except Stopped as stopped:
        logger.info("stopped %s", stopped)
        return
    try:
        finish(learner, learner.train(stop))
    finally:
        learner.close()


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(f"learner: {error}", file=sys.stderr)
        sys.exit(2)
