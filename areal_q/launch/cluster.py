"""What a launch asks a scheduler for, whichever it is."""

import math
from dataclasses import dataclass
from pathlib import Path

from areal_q.checks.automatic import settled
from areal_q.checks.memory import learner_memory, total, worker_memory
from areal_q.checks.pass_memory import Lengths
from areal_q.config import Run, SglangEngine, VllmEngine
from areal_q.models.shape import shape_of
from areal_q.tasks import build_task, build_tokenizer

_ROOM = 1.25
"""Memory that is asked for, over what is expected: a job that is killed for want of it costs more."""
_CUDA_MB = 4000
"""MB of the host that CUDA, its libraries and what NCCL pins take in the process of a GPU, beside the parts of
areal_q/checks/memory.py, which are those of one process"""


@dataclass(frozen=True)
class Cluster:
    """Hosts and devices for the roles of a run."""

    run: Run
    place: Path
    """The directory of areal_q/launch/place.py."""
    python: str
    """The interpreter that the hosts start."""
    nodes: int = 1
    """Hosts of the learner."""
    gpus: int = 0
    """GPUs of the learner on each of them, with a process each; 0: one process on a CPU."""
    workers: int = 1
    worker_gpus: int = 0
    """GPUs of each worker."""
    setup: str = ""
    """Shell commands before each role, such as `module load cuda`."""
    redis: str = ""
    """URL of a Redis that runs already; "": one beside the learner."""
    learner_options: tuple[str, ...] = ()
    """Further lines for the scheduler, for the learner; and for workers."""
    worker_options: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return max(1, self.gpus)

    @property
    def learner_cores(self) -> int:
        """Threads of the ranks, and one for what is published and logged beside them."""
        return self.ranks * self.run.learner.threads + 1

    @property
    def worker_cores(self) -> int:
        """Threads of a worker; an engine in processes of its own takes more."""
        served = isinstance(self.run.rollout.engine, VllmEngine | SglangEngine)
        return self.run.rollout.threads + 3 * served

    def role(self, role: str) -> list[str]:
        """Returns the command of a role, without what only the host knows."""
        shared = [
            self.python,
            "-P",
            "-X",
            "utf8",
            "-m",
            "areal_q.launch.role",
            role,
            str(self.place),
        ]
        redis = [f"--redis={self.redis}"] if self.redis else []
        if role == "worker":
            return [*shared, *redis]
        hosts = [f"--nodes={self.nodes}", f"--ranks={self.ranks}"]
        return [*shared, *hosts, f"--workers={self.workers}", *redis]

    def megabytes(self) -> tuple[int, int]:
        """Returns how much of a host's memory the learner's and a worker's job ask for, in MB."""
        run = settled(self.run)
        tokenizer, task = build_tokenizer(run.model, run.task), build_task(run.task)
        shape = shape_of(run.model, tokenizer)
        prompt = len(tokenizer.encode_prompt(task.train[0].asked))
        lengths = Lengths(prompt, run.rollout.tokens_after_prompt)
        learner = total(learner_memory(run, shape, lengths, self.nodes * self.ranks))
        worker = total(worker_memory(run, shape, lengths))
        return (
            math.ceil(_ROOM * learner / 1e6) + self.gpus * _CUDA_MB,
            math.ceil(_ROOM * worker / 1e6) + self.worker_gpus * _CUDA_MB,
        )
