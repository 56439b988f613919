"""Parts of a learner as it builds them: policies, their checkpoints and bytes; admission, pool and reader."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from areal_q.config import Run
from areal_q.models import Decoder
from areal_q.quant import quantize_state
from areal_q.tasks import build_task, build_tokenizer, columns_for
from areal_q.weights.version import WeightVersion, pack_version
from buffer.redis_store import LearnerBuffer
from buffer.sampling.replay_pool import ReplayPool
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.build import build_admission
from learner.build_policy import build_model
from learner.data.admission import Admission
from learner.data.group_reader import GroupReader, WhileWaiting
from learner.data.staleness import VersionHistory


def initial_model(run: Run) -> Decoder:
    """Returns the model of `run` before any training."""
    return build_model(run.model, build_tokenizer(run.model, run.task), run.seed)


def build_policy(run: Run, temperature: float = 1.0) -> TorchPolicy:
    """Returns the policy of `run` at its beginning, for rollouts at `temperature`."""
    model = initial_model(run)
    set_precision(model, run)
    return TorchPolicy(model, run.learner, temperature)


def pack_state(
    state: dict[str, torch.Tensor], model: dict[str, Any], format: str = "bf16", version: int = 0
) -> WeightVersion:
    """Returns the version with `state`, quantized, of a model with this config.json."""
    return pack_version(
        quantize_state(state, format), run="r", epoch="e", version=version, format=format,
        uaq_scale=1.0, model=model, published_s=0.0,
    )  # fmt: skip


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 [nbytes], to compare bit for bit."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def save_at(step: int, directory: Path, policy: TorchPolicy, keep: int = 1) -> None:
    """Saves a checkpoint of a policy that is part of no run: nothing is admitted, nothing published."""
    state = checkpoint.State(
        step=step, position="0-1", cursor=1, outstanding=[], digests={},
        updates=policy.updates, skipped=policy.skipped,
    )  # fmt: skip
    checkpoint.save(directory, state, policy, keep)


def new_admission(
    run: Run, buffer: LearnerBuffer, cursor: int = 0, outstanding: set[int] | None = None
) -> Admission:
    """Returns the admission of `run`, which goes on at ticket `cursor` with tickets that are outstanding."""
    task, tokenizer = (
        build_task(run.task, columns_for(run)),
        build_tokenizer(run.model, run.task),
    )
    return Admission(run, task, tokenizer, buffer, cursor, outstanding or set())


def build_pool(run: Run, position: str = "0-0", uses: dict[int, int] | None = None) -> ReplayPool:
    """Returns the pool of `run`, empty, from `position` of the groups stream on."""
    return ReplayPool(run.buffer, run.learner, run.seed, run.steps, position, uses)


def build_group_reader(
    run: Run,
    buffer: LearnerBuffer,
    admission: Admission,
    history: VersionHistory,
    uses: dict[int, int] | None = None,
) -> GroupReader:
    """Returns the reader of `run` with a pool of its own, from the buffer's position on."""
    pool = build_pool(run, buffer.position, uses)
    return GroupReader(buffer, admission, history, run.learner, pool)


class Learning(WhileWaiting):
    """The learner's side with its group_reader, over a server that may lose its last seconds."""

    def __init__(self, run: Run, url: str, state: checkpoint.State | None = None) -> None:
        self.buffer = LearnerBuffer(url, run.name, patience_s=30.0)
        task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
        self.admission = build_admission(run, task, tokenizer, self.buffer, state)
        history = VersionHistory(run.learner.versions_kept, {v: f"d{v}" for v in range(9)})
        self.buffer.publish_run("", {})
        self.group_reader = build_group_reader(run, self.buffer, self.admission, history)
        self.steps = state.step if state else 0
        self.rooms_made = 0

    def make_room(self, step: int) -> bool:
        self.rooms_made += 1
        self.buffer.trim(self.group_reader.position)
        return True

    def step(self, work: Callable[[], None]) -> list[int]:
        """`work` goes on while the learner waits."""
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.01):
                work()

        self.admission.admit(0)
        work()
        thread = threading.Thread(target=go_on)
        thread.start()
        drawn = self.group_reader.take(0, threading.Event(), self)
        over.set()
        thread.join()
        assert drawn
        self.group_reader.consumed()
        self.steps += 1
        return [group.ticket.number for group in drawn.groups]

    def state(self) -> checkpoint.State:
        return checkpoint.State(
            step=self.steps,
            position=self.group_reader.position,
            cursor=self.admission.cursor,
            outstanding=sorted(self.admission.outstanding),
            digests={},
            uses=self.group_reader.uses,
            lost=sorted(self.admission.lost),
            updates=0,
            skipped=0,
        )
