"""The learner's step from Python, and the groups that it learns from: a log's, or made of completions."""

import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_q.api.handed_over import Code, place_of_code
from areal_q.api.rollout import Completion
from areal_q.config import load
from areal_q.config.load import Override
from areal_q.errors import RecordError
from areal_q.messages import Array, Group, Ticket, Trajectory, VersionSpan, merge_spans
from areal_q.messages.tokens import mask_array
from areal_q.system.run_dir import as_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from areal_q.models import Decoder


class Learner:
    """A policy and its optimizer, one step at a time, by the very code of a run's loop.

        learner = areal_q.Learner.at("runs/demo", objective=mine)
        for step, groups in areal_q.logged("runs/demo"):
            print(step, learner.step(groups)["train/loss"])

    It is in this process: no worker, no Redis, and a debugger stops in a loss of one's own.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        objective: Code | None = None,
        advantage: Code | None = None,
        config: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins as a run with these settings does, after its warm start. `model` is a directory in Hugging
        Face layout; None is the built-in small one, or that of `config`. Raises UserError."""
        inputs = Path((settings or {}).get("root", load(config).root), "inputs")
        given: list[Override] = []
        if model is not None:
            given.append(("model", {"type": "pretrained", "path": str(model)}))
        given += [(f"{place}.path", path) for place, path in _own(objective, advantage, inputs)]
        run = load(config, [*given, *(settings or {}).items()])
        self._steps = import_module("learner.api.steps").Steps.begun(run)

    @classmethod
    def at(
        cls,
        run: Any,
        step: int | None = None,
        *,
        objective: Code | None = None,
        advantage: Code | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> "Learner":
        """Returns the learner of a run, as its checkpoint of `step` has it; None is the first one. With
        settings, or an objective or advantage of one's own, it goes on with those. Raises UserError."""
        directory = Path(getattr(run, "directory", run))
        given = as_pairs(settings)
        for place, path in _own(objective, advantage, directory.parent / "inputs"):
            given.append((f"{place}.path", path))
        learner = cls.__new__(cls)
        learner._steps = import_module("learner.api.steps").Steps.of_run(directory, step, given)
        return learner

    @property
    def version(self) -> int:
        """The step that comes next, which is also the version of the weights."""
        return self._steps.step

    @property
    def model(self) -> "Decoder":
        """The policy, a torch module."""
        return self._steps.model

    def weights(self) -> "dict[str, Tensor]":
        """Returns the policy's weights by their names. The next step changes them; clone what shall stay."""
        return self._steps.model.state_dict()

    def step(self, groups: Sequence[Group], weights: Sequence[float] = ()) -> dict[str, float]:
        """Learns from the groups, in their order, and returns the step's metrics by their names in
        docs/metrics.md. `weights` are of the groups' advantages, in (0, 1]; none are all 1. Raises RecordError
        for a group that does not fit, and ConfigError for a response that no micro-batch has room for."""
        return self._steps.learn(groups, weights)

    def save(self, directory: str | Path) -> Path:
        """Writes the model in Hugging Face layout, and returns the directory."""
        self._steps.save(Path(directory))
        return Path(directory)


def logged(run: Any, first: int = 0, stop: int | None = None) -> Iterator[tuple[int, list[Group]]]:
    """Yields (step, groups) of the steps `first` … `stop` - 1 of a run's log, in the order in which they were
    learnt from. Raises LogError if there is no log."""
    directory = Path(getattr(run, "directory", run))
    iter_log = import_module("buffer.logs.trajectory_log").iter_log
    yield from iter_log(directory / "trajectories", first, stop)


def group(completions: Sequence[Completion], rewards: Sequence[float], number: int = 0) -> Group:
    """Returns the group of responses to one prompt, which an advantage compares with each other. Raises
    RecordError for what breaks a group's contract, and for tokens of which nobody tells what was left out."""
    if not completions or len(completions) != len(rewards):
        counts = f"{len(completions)} responses and {len(rewards)} rewards"
        raise RecordError(f"{counts}: a group has as many of both, and one at least")
    sampling = completions[0].sampling
    if sampling.truncated and not all(one.sampling_mask for one in completions):
        raise RecordError(
            "top_p, top_k or min_p left tokens out, and only an engine of this process says which, given a "
            "top_k of at most 512"
        )
    ticket = Ticket(
        run="api",
        number=number,
        step=0,
        prompt="",
        answer="",
        prompt_ids=Array.of(completions[0].prompt_ids, "int32"),
        group_size=len(completions),
        sampling=sampling,
        seed=0,
    )
    trajectories = [
        Trajectory(
            index=index,
            response_ids=Array.of(one.ids, "int32"),
            behavior_logprobs=Array.of(one.logprobs, "float32"),
            loss_mask=Array.of(one.mask or [1] * len(one.ids), "uint8"),
            spans=merge_spans(VersionSpan(version, 1, "") for version in one.versions),
            finish_reason=one.finish_reason,
            reward=float(reward),
            reward_parts={"correct": float(reward >= 1)},
            sampling_mask=mask_array(one.sampling_mask),
        )
        for index, (one, reward) in enumerate(zip(completions, rewards, strict=True))
    ]
    now = time.time()
    made = Group(
        ticket=ticket, worker="api", engine="", weight_format="", trajectories=trajectories,
        started_s=now, finished_s=now,
    )  # fmt: skip
    return made.validate()


def _own(objective: Code | None, advantage: Code | None, inputs: Path) -> Iterator[tuple[str, str]]:
    for place, code in (("objective", objective), ("advantage", advantage)):
        if code is not None:
            yield f"learner.{place}", place_of_code(code, inputs)
