"""Ray: a job that holds a placement group for the learner's hosts, and one bundle for each worker.

The job's script asks Ray for places and starts a role in each. It is written to the launch's directory, which
all hosts must see. A role whose host is lost is begun again by Ray, the learner from its newest checkpoint.
`ray job stop` tells all roles to go, and so does the end of what started them: the learner writes a checkpoint.
"""

from pathlib import Path

import msgspec

from areal_q.launch.cluster import Cluster

SCRIPT = '''\
"""Made by `areal-q launch ray`: starts the roles of a run on a Ray cluster."""

import os
import signal
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LEARNER = {learner}
WORKER = {worker}
NODES, WORKERS = {nodes}, {workers}
LEARNER_PLACE = {learner_place}
WORKER_PLACE = {worker_place}
SETUP = {setup}


@ray.remote(max_retries=-1)
def role(command):
    """Runs a role until it ends, and tells it to go if this task is cancelled."""
    command = [*command, "--host=" + ray.util.get_node_ip_address()] if "learner" in command else command
    shell = ["bash", "-c", SETUP + '\\nexec "$@"', "role", *command]
    process = subprocess.Popen(shell if SETUP else command)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def main():
    ray.init()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    start = "--start=" + os.environ.get("RAY_JOB_SUBMISSION_ID", str(os.getpid()))
    group = placement_group([LEARNER_PLACE] * NODES, strategy="STRICT_SPREAD" if NODES > 1 else "PACK")
    ray.get(group.ready())
    learners = [
        role.options(
            num_cpus=LEARNER_PLACE["CPU"],
            num_gpus=LEARNER_PLACE.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        ).remote([*LEARNER, start, f"--rank={{i}}"])
        for i in range(NODES)
    ]
    # Each by itself, so that one which finds no place yet holds up nobody.
    workers = [
        role.options(num_cpus=WORKER_PLACE["CPU"], num_gpus=WORKER_PLACE.get("GPU", 0)).remote(
            [*WORKER, f"--id=worker-{{i}}"]
        )
        for i in range(WORKERS)
    ]
    try:
        codes = ray.get(learners)
        ray.get(workers)
    except BaseException:
        for task in (*learners, *workers):
            ray.cancel(task)
        raise
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
'''


def script(cluster: Cluster) -> str:
    def shown(value: object) -> str:
        return repr(msgspec.to_builtins(value))

    return SCRIPT.format(
        learner=shown(cluster.role("learner")),
        worker=shown(cluster.role("worker")),
        nodes=cluster.nodes,
        workers=cluster.workers,
        learner_place=shown(_bundle(cluster.learner_cores, cluster.gpus)),
        worker_place=shown(_bundle(cluster.worker_cores, cluster.worker_gpus)),
        setup=shown(cluster.setup),
    )


def _bundle(cpus: int, gpus: int) -> dict[str, int]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def write(cluster: Cluster) -> list[Path]:
    """Writes the job's script to the launch's directory, and returns its path."""
    path = cluster.place / "ray_job.py"
    path.write_text(script(cluster), "utf-8")
    return [path]


def command(path: Path) -> list[str]:
    """Returns the command that submits the job."""
    return ["ray", "job", "submit", "--no-wait", "--", "python", str(path)]
