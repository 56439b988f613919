"""`python -m areal_q.system.torchrun …` runs torchrun and exits with the code of the process that failed first.

torchrun itself exits with 1 whatever the exit codes of its processes, from which an orchestrator could not tell
a wrong setting (2), or a learner stopped by SIGTERM (143), from a crash (areal_q/system/stop_request.py). Also
it reports each end by thirty lines and a traceback, on each host, which hide the line of the process itself.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_q.system.command import accept_any_text

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_S = 280
"""Seconds that torchrun leaves its ranks for their step and a checkpoint"""
_REPORTERS = ("multiprocessing.api", "agent.server.api")
"""Loggers of torch.distributed.elastic: of a process that failed, and of another host that has ended"""


def by_torchrun(*where: str, shutdown_s: int = SHUTDOWN_S) -> list[str]:
    """Returns the module and the arguments that start several processes of the learner, but for its own;
    `where` says how many, and where they meet."""
    return ["areal_q.system.torchrun", *where, f"--shutdown-timeout={shutdown_s}", "-m", "learner"]


def torchrun(arguments: Sequence[str]) -> int:
    """Runs torchrun. Returns 0, the exit code of the process that failed first, or 128 plus the number of the
    signal that ended that process or torchrun."""
    # Before torch is imported, whose warnings have stacks of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in _REPORTERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except SignalException as told:
        return 128 + told.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        if code != 2:  # whoever ends with 2 has said why
            print(f"torchrun: {_end_of(rank, failure)}", file=sys.stderr)
        return code
    # Ranks other than the first exit with 0 even if the run is not finished. In an Indexed Job of Kubernetes a
    # pod that exited with 0 counts as complete, and would be missing when the run goes on.
    return 0 if os.environ.get("JOB_COMPLETION_INDEX", "0") == "0" else 128 + signal.SIGTERM


def _end_of(rank: int, failure: "ProcessFailure") -> str:
    """Example: rank 1 (process 4711) was killed by SIGKILL"""
    code = failure.exitcode
    end = f"ended with exit code {code}" if code >= 0 else f"was killed by {failure.signal_name()}"
    return f"rank {rank} (process {failure.pid}) {end}"


if __name__ == "__main__":
    accept_any_text()
    sys.exit(torchrun(sys.argv[1:]))
