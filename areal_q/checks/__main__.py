"""`python -m areal_q.checks < config.toml` reads a run's model as the learner will, and rewards of the user's
own as a worker will, in a process of its own, as the launcher does without torch. Prints what it found.

Exit codes: 0 the run can start with it, 2 it cannot, for the reason in one line on stderr.
"""

import asyncio
import sys

from areal_q.checks.model import check_model, findings
from areal_q.checks.packages import worker_python
from areal_q.config import parse
from areal_q.system.command import run_command
from areal_q.tasks import has_own_reward, try_start


def main() -> None:
    run = parse(sys.stdin.read(), "settings")
    model = check_model(run)
    # Workers that are not here, or run by another Python, may have packages that are not here.
    if has_own_reward(run) and run.rollout.workers and worker_python(run) == sys.executable:
        asyncio.run(try_start(run))
    for found in findings(run, model):
        mark = "warning: " if found.level == "warning" else ""
        fix = f"; take {found.fix}" if found.fix else ""
        print(f"{mark}{found.name}: {found.says}{fix}")


if __name__ == "__main__":
    run_command("run", main, who="model")
