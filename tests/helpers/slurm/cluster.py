"""A small Slurm for tests: sbatch, srun, scontrol and scancel, by the name under which this file is called.

Jobs are processes of this machine; what is known of each is in $SLURM_STUB/JOB.json. sbatch starts a script for
each task of its array, with the environment that Slurm gives it, and anew if it was queued again. srun starts
the command once for each host of its job, passes signals on, and ends with the highest exit code.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import dropwhile
from pathlib import Path

STATE = Path(os.environ.get("SLURM_STUB", ""))
RESTARTS = 3


def directives(script: str) -> dict[str, str]:
    """Returns what a script asks for, as sbatch reads it: up to # or white space without quotes."""
    lines = re.findall(r"^#SBATCH (.*)$", Path(script).read_text(), re.MULTILINE)
    words = [shlex.split(line, comments=True)[0].removeprefix("--") for line in lines]
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def sbatch(arguments: list[str]) -> None:
    script = arguments[-1]
    asked = directives(script)
    (STATE / f"submitted-{Path(script).name}").write_text(" ".join(arguments))
    job = str(1000 + len(list(STATE.glob("*.json"))))
    first, _, last = asked.get("array", "0-0").partition("-")
    for index in range(int(first), int(last or first) + 1):
        known = {"array": "array" in asked, "nodes": int(asked.get("nodes", 1)), "script": script}
        known |= {"job": job, "index": index, "output": asked["output"]}
        name = f"{job}_{index}" if known["array"] else job
        (STATE / f"{name}.json").write_text(json.dumps(known))
        command = [sys.executable, __file__, "queue", name]
        quiet = subprocess.DEVNULL  # whoever reads what sbatch says waits for its end alone
        subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    print(job)


def queue(name: str) -> None:
    """Runs a job, and again as often as it was put into the queue anew."""
    known = json.loads((STATE / f"{name}.json").read_text())
    output = known["output"].replace("%j", known["job"]).replace("%A", known["job"])
    for restart in range(RESTARTS):
        given = {
            "SLURM_JOB_ID": known["job"],
            "SLURM_NNODES": str(known["nodes"]),
            "SLURMD_NODENAME": "localhost",
        }
        given |= {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
        if known["array"]:
            given |= {
                "SLURM_ARRAY_JOB_ID": known["job"],
                "SLURM_ARRAY_TASK_ID": str(known["index"]),
            }
        with open(output.replace("%a", str(known["index"])), "ab") as log:
            process = subprocess.Popen(
                ["bash", known["script"]],
                env=os.environ | given,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (STATE / f"{name}.pid").write_text(str(process.pid))
        code = process.wait()
        (STATE / f"{name}.code-{restart}").write_text(str(code))
        again = STATE / f"{name}.requeue"
        if not again.exists():
            return
        again.unlink()
        while (STATE / "held").exists():  # jobs in the queue find no host meanwhile
            time.sleep(0.05)


def srun(arguments: list[str]) -> None:
    command = list(dropwhile(lambda argument: argument.startswith("--"), arguments))
    nodes = int(os.environ["SLURM_NNODES"])
    tasks = [
        subprocess.Popen(command, env=os.environ | {"SLURM_NODEID": str(i)}) for i in range(nodes)
    ]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, frame: [task.send_signal(n) for task in tasks])
    sys.exit(max(task.wait() for task in tasks))


def scontrol(arguments: list[str]) -> None:
    assert arguments[0] == "requeue", arguments
    (STATE / f"{arguments[1]}.requeue").touch()


def scancel(arguments: list[str]) -> None:
    """scancel [--signal=USR1] JOB: to the batch script alone, as `--signal=B:USR1@…` has it."""
    number = signal.SIGTERM
    for argument in arguments:
        if argument.startswith("--signal="):
            number = signal.Signals[f"SIG{argument.partition('=')[2]}"]
            continue
        pid = STATE / f"{argument}.pid"
        while not pid.exists():
            time.sleep(0.05)
        os.kill(int(pid.read_text()), number)


if __name__ == "__main__":
    called = Path(sys.argv[0]).name.removesuffix(".py")
    name, *rest = sys.argv[1:] if called == "cluster" else [called, *sys.argv[1:]]
    commands = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}
    queue(*rest) if name == "queue" else commands[name](rest)
