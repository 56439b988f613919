"""Checkpoints of the learner: their files, the policy's tensors in them, and the thread that writes them."""

from learner.checkpoint.files import (
    SHARE,
    START,
    STATE,
    TENSORS,
    State,
    Tensors,
    read_state,
    read_tensors,
    stage,
    steps,
    write,
    write_share,
)
from learner.checkpoint.policy_state import STICKY, load, policy_of, restore, save, tensors_of

__all__ = [
    "SHARE",
    "START",
    "STATE",
    "STICKY",
    "TENSORS",
    "State",
    "Tensors",
    "load",
    "policy_of",
    "read_state",
    "read_tensors",
    "restore",
    "save",
    "stage",
    "steps",
    "tensors_of",
    "write",
    "write_share",
]
