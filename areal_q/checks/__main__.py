"""`python -m areal_q.checks < config.toml` reads a run's model as the learner will, in a process of its own, as
the launcher does without torch. Prints what it found.

Exit codes: 0 the run can start with it, 2 it cannot, for the reason in one line on stderr.
"""

import sys

from areal_q.checks.model import check_model, findings
from areal_q.config import parse
from areal_q.system.command import run_command


def main() -> None:
    run = parse(sys.stdin.read(), "settings")
    for found in findings(run, check_model(run)):
        mark = "warning: " if found.level == "warning" else ""
        fix = f"; take {found.fix}" if found.fix else ""
        print(f"{mark}{found.name}: {found.says}{fix}")


if __name__ == "__main__":
    run_command("run", main, who="model")
