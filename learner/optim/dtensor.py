"""The rows of a parameter that FSDP2 gives to each rank: equally many, but for the last ranks, which may have
fewer or none."""

from torch import Tensor


def local(p: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, and any other tensor as it is. It does not import DTensor, which
    takes a second."""
    return p.to_local() if hasattr(p, "to_local") else p  # type: ignore[attr-defined]


def most_rows(p: Tensor, ranks: int) -> int:
    """Returns the largest number of rows that any rank holds."""
    return -(-len(p) // ranks)
