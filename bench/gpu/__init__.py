"""What can be measured on a GPU alone: bench/gpu/run.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of a table: its name, figures by column, and a word on it."""

    name: str
    values: dict[str, float]
    note: str = ""
