"""Messages from rank 0 to the other ranks of a learner: one tagged union, strictly decoded."""

from typing import Any, Literal

import msgspec
import numpy as np

from areal_q.config.learner import Rate
from areal_q.messages import Array, Trajectory
from learner.data.packing import Sample


class SentSample(msgspec.Struct, frozen=True, array_like=True):
    """A Sample in the form in which rank 0 sends it to the other ranks."""

    ticket: int
    prompt_ids: Array
    trajectory: Trajectory
    advantage: float | Array
    lag: Array
    weight: float
    source: str
    shared: int
    branch: int
    share: float
    of_turns: float
    masked: bool

    @classmethod
    def of(cls, s: Sample) -> "SentSample":
        prompt, lag = Array.of(s.prompt_ids, "int32"), Array.of(s.lag, "int64")
        advantage = s.advantage
        if isinstance(advantage, np.ndarray):
            advantage = Array.of(advantage, "float32")
        tree = s.source, s.shared, s.branch, s.share, s.of_turns, s.masked
        return cls(s.ticket, prompt, s.trajectory, advantage, lag, s.weight, *tree)

    def sample(self) -> Sample:
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        arrays: dict[str, Any] = {n: x.numpy() for n, x in fields.items() if isinstance(x, Array)}
        return Sample(**fields | arrays)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Describes rank 0's whole policy, before its tensors are scattered."""

    model: dict
    """The architecture, as a Hugging Face `config.json`."""
    temperature: float
    updates: int
    skipped: int
    moments: bool
    """True if the optimizers have moments, which are scattered too."""
    dtype: Literal["auto", "float32", "bfloat16"]
    """`learner.dtype`, which may be `auto` in the other ranks' own settings."""
    rates: tuple[Rate, Rate]
    """`learner.rates`, likewise."""
    unquantized: Literal["auto", "fp32", "bf16"]
    """`rollout.unquantized`, likewise."""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Makes all ranks learn from these samples together."""

    pieces: list[SentSample]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Asks for all that a checkpoint contains besides the weights: moments and the critic."""

    staged: str = ""
    """The directory into which each rank writes its share; if empty, everything is gathered on rank 0."""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Makes the present policy the reference policy."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Ends the other ranks."""


Message = Begin | Step | Collect | Reset | End
