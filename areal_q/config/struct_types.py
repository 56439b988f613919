"""The bases of settings: Structs that refuse unknown fields, and bounded numbers.

A number's bound is in its type, so that an error names the path of the setting.
Every number has an upper bound. Where nothing smaller is meant it is one that no run reaches, so that what is
taken fits the integers and the floats it is put into; an infinity is taken only where it means "no bound".
"""

from typing import Annotated, Any

from msgspec import Meta, Struct


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings."""


class TaggedSettings(Settings, frozen=True, kw_only=True, tag_field="type"):
    """One of several tables, chosen by `type`."""


class PythonCode(TaggedSettings, frozen=True, kw_only=True, tag="python"):
    """A function of the user's own, which is trusted code (areal_q/plugins.py)."""

    path: str
    """The Python file, also `FILE:FUNCTION`; or `PACKAGE.MODULE:FUNCTION`."""
    settings: dict[str, Any] = {}
    """The function's own settings, which it gets as keyword arguments."""
    digest: str = ""
    """Hash of the file and of those beside it that it imports. A run fills it in as it begins; of
    objective, advantage and order a resumption and a replay refuse others."""


GENERAL = 10**12
"""The upper bound of whole numbers that have no other."""
LARGEST_FLOAT = 1e300
"""The upper bound of floats that have no other."""

Positive = Annotated[float, Meta(gt=0, le=LARGEST_FLOAT)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
AtLeastOne = Annotated[float, Meta(ge=1, le=LARGEST_FLOAT)]
Weight = Annotated[float, Meta(ge=-1e9, le=1e9)]
"""A factor of a reward."""
Limit = Annotated[float, Meta(gt=0)]
"""A bound; infinity means that there is none."""
Cap = Annotated[float, Meta(ge=1)]
"""A bound; infinity means that there is none."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
"""At most 11 days, which timers of sockets and threads take."""

Count = Annotated[int, Meta(ge=1, le=GENERAL)]
WholeNumber = Annotated[int, Meta(ge=0, le=GENERAL)]
HeldOut = Fraction | WholeNumber
"""What is kept for evaluation: a share with a decimal point, or a number of rows without."""
Thousands = Annotated[int, Meta(ge=1, le=100_000)]
"""A number of things that each take memory or time at every step, such as the groups of a batch."""
Threads = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
