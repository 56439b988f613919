"""torchrun with the exit codes that an orchestrator goes by: real processes, two of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.paths import ROOT

COMMAND = [sys.executable, "-m", "areal_q.system.torchrun", "--standalone", "--nproc-per-node=2"]
RANK_0 = "import os, signal, sys, time\nif os.environ['RANK'] == '0':\n    "
OTHERS = "\ntime.sleep(600)"


@pytest.mark.parametrize(
    ("first_rank", "code"),
    [("sys.exit(2)", 2), ("sys.exit(143)", 143), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
    ids=["setting", "drained", "killed"],
)
@pytest.mark.slow
def test_torchrun_ends_with_the_code_of_the_rank_that_ended(tmp_path: Path, first_rank, code):
    script = tmp_path / "rank.py"
    script.write_text(RANK_0 + first_rank + OTHERS)
    assert subprocess.run([*COMMAND, str(script)], cwd=ROOT, capture_output=True).returncode == code


@pytest.mark.slow
def test_other_pods_of_a_job_never_complete_by_themselves(tmp_path: Path):
    (script := tmp_path / "rank.py").write_text("")
    for index, code in ("0", 0), ("1", 143):
        environment = {**os.environ, "JOB_COMPLETION_INDEX": index}
        done = subprocess.run([*COMMAND, str(script)], cwd=ROOT, env=environment)
        assert done.returncode == code


@pytest.mark.slow
def test_torchrun_told_to_go_says_so_by_143(tmp_path: Path):
    script, ready = tmp_path / "rank.py", tmp_path / "ready"
    script.write_text(RANK_0 + f"open({str(ready)!r}, 'w')" + OTHERS)
    with subprocess.Popen([*COMMAND, str(script)], cwd=ROOT) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
