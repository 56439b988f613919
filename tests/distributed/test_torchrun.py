"""torchrun with the exit codes that an orchestrator goes by: real processes, two of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers.commands import is_alive
from helpers.kubernetes.overlays import build, kustomization
from helpers.paths import ROOT

from areal_q.errors import RankLost
from areal_q.system.ports import free_ports
from learner.multi_process import MultiProcessUpdater

COMMAND = [sys.executable, "-m", "areal_q.system.torchrun", "--standalone", "--nproc-per-node=2"]
RANK_0 = "import os, signal, sys, time\nif os.environ['RANK'] == '0':\n    "
OTHERS = "\ntime.sleep(600)"
JOINS = """
import os, time
from pathlib import Path
from areal_q.config import load
from learner.multi_process import join

ranks = join(load(None, []))
Path(DIRECTORY, f"made-{ranks.rank}").write_text(str(os.getpid()))
Path(DIRECTORY, f"made-{ranks.rank}").rename(Path(DIRECTORY, f"rank-{ranks.rank}"))
time.sleep(600)
"""
REFUSES_ALONE = """
import os, time
from areal_q.errors import ConfigError
from areal_q.system import stop_request
from areal_q.system.command import exit_with

if os.environ["RANK"] == "0":
    time.sleep(600)
stop_request.RANK_0_S = 0.1
stop = stop_request.StopRequest()
stop.listen()
try:
    with stop.left_to_rank_0():
        raise ConfigError("no such device")
except ConfigError as error:
    exit_with(error, 2, "here")
"""


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


REFUSALS = {
    "every rank": (["learner", "no.such=1"], "no: no such setting"),
    "rank 0, while the others wait for it to join": (
        ["learner", "steps=1000000", "checkpoint.every=1", "checkpoint.keep=1000000"],
        "1000001 checkpoints of the model need",
    ),
    "rank 0, when all have joined": (["learner", "task.prompt='{a}é{b}'"], "character 'é'"),
    "rank 0, of a supervised run": (["areal_q", "task.prompt='{a}é{b}'"], "character 'é'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("by", REFUSALS)
def test_two_ranks_refuse_a_setting_by_one_line(tmp_path: Path, by: str):
    """torchrun's thirty lines, a second rank's, an abort at the exit and a rank that did not end hid it."""
    (module, *settings), line = REFUSALS[by]
    config = str(ROOT / "configs/quickstart.toml")
    known = ["--redis=redis://127.0.0.1:1", f"--config={config}"]
    known = ["sft", config] if module == "areal_q" else known
    command = [*COMMAND, "--shutdown-timeout=3600", "-m", module, *known, f"root='{tmp_path}'"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *settings], capture_output=True, env=environment, text=True)
    told = [
        text for text in done.stderr.splitlines() if text[:1] != "2"
    ]  # the log begins with a date
    assert done.returncode == 2 and len(told) == 1 and line in told[0], done.stderr


@pytest.mark.slow
def test_what_one_rank_alone_refuses_is_said(tmp_path: Path):
    script = tmp_path / "rank.py"
    script.write_text(REFUSES_ALONE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*COMMAND, str(script)], capture_output=True, env=environment, text=True)
    assert (done.returncode, done.stderr) == (2, "here: no such device\n")


@pytest.mark.slow
def test_other_pods_of_a_job_never_complete_by_themselves(tmp_path: Path):
    (script := tmp_path / "rank.py").write_text("")
    for index, code in ("0", 0), ("1", 143):
        environment = {**os.environ, "JOB_COMPLETION_INDEX": index}
        done = subprocess.run([*COMMAND, str(script)], cwd=ROOT, env=environment)
        assert done.returncode == code


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_pods_find_each_other_and_name_a_wrong_setting(tmp_path: Path, stack: ExitStack):
    """The command of docker/kubernetes/ranks for both pods, here on one machine."""
    (job,) = [x for x in build(kustomization(tmp_path, "base", "ranks")) if x["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell, flag, script, name = container["command"]
    script = script.replace("python", sys.executable, 1)
    script = script.replace("learner-0.ranks", "127.0.0.1").replace("29500", str(free_ports(1)[0]))
    arguments = ["--redis=redis://127.0.0.1:1", "--config=configs/quickstart.toml", "no.such=1"]
    pods = []
    for index in range(2):
        told = {"LEARNER_PODS": "2", "RANKS_PER_POD": "1", "JOB_COMPLETION_INDEX": str(index)}
        environment = {**os.environ, **told, "ARGS": "steps=3", "PYTHONPATH": str(ROOT)}
        command = [shell, flag, script, name, *arguments]
        pods.append(stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment)))
        stack.callback(pods[-1].kill)
    assert [pod.wait() for pod in pods] == [2, 2]


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_end_with_a_torchrun_that_was_killed(tmp_path: Path):
    script, pids = tmp_path / "rank.py", [tmp_path / f"rank-{rank}" for rank in range(2)]
    script.write_text(JOINS.replace("DIRECTORY", repr(str(tmp_path))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*COMMAND, str(script)], env=environment) as torchrun:
        while not all(pid.exists() for pid in pids):
            assert torchrun.poll() is None
            time.sleep(0.05)
        torchrun.kill()
    for pid in pids:
        while is_alive(int(pid.read_text())):
            time.sleep(0.05)


@pytest.mark.parametrize("ask", [MultiProcessUpdater.collect, MultiProcessUpdater.reset_reference])
def test_a_rank_that_is_lost_between_steps_is_named(ask: Callable[[MultiProcessUpdater], object]):
    """In a checkpoint, say: gloo's own words came through, and the end sent a message to whom was gone."""
    updater = object.__new__(MultiProcessUpdater)
    updater._ranks, updater.policy = Mock(rank=0), Mock()
    gone = Mock(side_effect=RuntimeError("[gloo/pair.cc:534] Connection closed by peer"))
    updater._shard, updater._broken = Mock(gather_rest=gone, reset_reference=gone), False
    with pytest.raises(RankLost, match="rank 0: another rank is gone"):
        ask(updater)
    sent = updater._ranks.broadcast.call_count
    updater.close()
    assert updater._ranks.broadcast.call_count == sent and not updater._shard.close.called
