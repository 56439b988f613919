"""What FSDP2 gives a rank of a parameter: rows, as many to each; the last ranks may have fewer or none."""

from torch import Tensor


def local(p: Tensor) -> Tensor:
    """This rank's shard of a DTensor, whose import takes a second; else the tensor itself."""
    return p.to_local() if hasattr(p, "to_local") else p  # type: ignore[attr-defined]


def most_rows(p: Tensor, ranks: int) -> int:
    """That a rank has."""
    return -(-len(p) // ranks)
