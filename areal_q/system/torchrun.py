"""`python -m areal_q.system.torchrun …`: torchrun, with the exit code of the process that ended it.

torchrun itself exits with 1 whatever its processes say, so that an orchestrator could tell neither a wrong
setting (2) nor a learner that was told to go (143) from a crash: areal_q/system/stop_request.py.
"""

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def torchrun(arguments: Sequence[str]) -> int:
    """Runs torchrun; returns 0, the exit code of the process that failed first, or 128 plus the number of the
    signal that ended it, or that told torchrun to go."""
    try:
        run(parse_args(list(arguments)))
    except SignalException as told:
        return 128 + told.sigval
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    # Ranks other than the first end well also where the run is not finished. Of a Job that Kubernetes calls
    # Indexed each pod must end so once, and would not be there when the run goes on.
    return 0 if os.environ.get("JOB_COMPLETION_INDEX", "0") == "0" else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
