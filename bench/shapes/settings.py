"""What a run of the bench measures."""

from dataclasses import dataclass

from areal_q.config.engines import Dtype


@dataclass(frozen=True)
class Settings:
    formats: list[str]
    sequences: list[int]
    dtypes: list[Dtype]
    peers: bool
    repeats: int
