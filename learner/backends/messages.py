"""Messages from rank 0 to the other ranks of one learner: one tagged union, decoded strictly."""

import msgspec

from areal_q.messages import Array, Trajectory
from learner.data.packing import Sample


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A sample on its way from rank 0 to another rank."""

    ticket: int
    prompt_ids: Array
    trajectory: Trajectory
    advantage: float
    lag: Array
    weight: float

    @classmethod
    def of(cls, s: Sample) -> "Piece":
        prompt, lag = Array.of(s.prompt_ids, "int32"), Array.of(s.lag, "int64")
        return cls(s.ticket, prompt, s.trajectory, s.advantage, lag, s.weight)

    def sample(self) -> Sample:
        prompt, lag = self.prompt_ids.numpy(), self.lag.numpy()
        return Sample(self.ticket, prompt, self.trajectory, self.advantage, lag, self.weight)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Describes rank 0's whole policy before its tensors are scattered."""

    model: dict
    """Hugging Face `config.json`"""
    temperature: float
    updates: int
    skipped: int
    moments: bool
    """True if the optimizers have moments to scatter"""


class Step(msgspec.Struct, frozen=True, tag="step"):
    """All ranks learn from these samples together."""

    pieces: list[Piece]


class Collect(msgspec.Struct, frozen=True, tag="collect"):
    """Asks for what a checkpoint holds besides the weights: moments and the critic."""

    staged: str = ""
    """Directory into which each rank writes its share; empty: everything is gathered on rank 0"""


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Makes the present policy the reference policy."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """The run is over; the other ranks leave."""


Message = Begin | Step | Collect | Reset | End
