"""The token log: what a learner step computed for every response token, with one row for each trajectory.

| column             | meaning                                                                              |
|--------------------|--------------------------------------------------------------------------------------|
| step               | as in the trajectory log; rows of equal (step, number, index) are of one response    |
| number, index      | ticket number of the group, and index of the response in it                          |
| proximal_logprobs  | log π_prox in nats, under the learner's policy before its first update on this batch |
| logprobs           | log π_θ in nats when the token's loss was last computed; R = exp of the difference   |
| entropy            | entropy of π_prox in nats                                                            |
| advantages         | advantage of the token in the loss                                                   |
| lag                | versions between the weights that drew the token and the learner's                   |
| marks              | what the objective did to the token, a sum of MARKS                                  |
| largest_gap        | largest distance of log π_prox and log π_behav of a token that counts                |
| marked             | number of tokens that count and have a mark                                          |

Lists have one value for each response token. Together with behavior_logprobs of the trajectory log they give
every ratio of the step, without running a model.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from buffer.logs.parquet_log import LogFormat, ParquetLog

_SCHEMA_VERSION = 1
_METADATA_KEY = b"areal-q-tokens-schema"
MARKS = {"clipped_up": 1, "clipped_down": 2, "clipped_dual": 4, "truncated": 8, "dropped": 16}
"""Bits of a mark. A clipped token's ratio is out of its bounds, so that it has no gradient; a truncated one's
mismatch weight was above its cap; a dropped one was masked out by the objective."""
_LISTS = {
    "proximal_logprobs": pa.float32(),
    "logprobs": pa.float32(),
    "entropy": pa.float32(),
    "advantages": pa.float32(),
    "lag": pa.int32(),
    "marks": pa.uint8(),
}
TOKEN_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("number", pa.int64()),
        ("index", pa.int64()),
        *((name, pa.list_(type)) for name, type in _LISTS.items()),
        ("largest_gap", pa.float32()),
        ("marked", pa.int32()),
    ],
    metadata={_METADATA_KEY: str(_SCHEMA_VERSION)},
)
TOKEN_LOG_FORMAT = LogFormat(TOKEN_SCHEMA, _METADATA_KEY, _SCHEMA_VERSION)


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """The columns above, except `step`, for S responses with T tokens in all, one response after the other."""

    number: np.ndarray
    """Number of each response's ticket, int64 [S]"""
    index: np.ndarray
    """Index of each response in its group, int64 [S]"""
    lengths: np.ndarray
    """Tokens of each response, int64 [S], at least 1"""
    proximal_logprobs: np.ndarray
    """Log-probs in nats just before the first update on the batch, float32 [T]"""
    logprobs: np.ndarray
    """Log-probs in nats when each token's loss was last computed, float32 [T]"""
    entropy: np.ndarray
    """Entropy in nats of the policy that gave `proximal_logprobs`, float32 [T]"""
    advantages: np.ndarray
    """Advantage of each token, float32 [T]"""
    lag: np.ndarray
    """Versions between the weights that drew the token and the learner's, int32 [T]"""
    marks: np.ndarray
    """Sum of MARKS for each token, uint8 [T]"""
    behavior_logprobs: np.ndarray
    """Log-probs in nats under the policy that drew the tokens, float32 [T]. They serve to compute `largest_gap`
    and are not logged here, since the trajectory log has them."""
    mask: np.ndarray
    """True for the tokens that count, bool [T]"""


class TokenLog(ParquetLog):
    """The writer of the token log in `directory`, which is flushed together with the trajectory log."""

    def __init__(self, directory: str | Path, resume_at: int = 0) -> None:
        super().__init__(directory, TOKEN_LOG_FORMAT, resume_at)

    def append(self, step: int, scores: TokenScores) -> None:
        if len(scores.number):
            self.append_rows(lambda: tokens_to_table(step, scores))


def tokens_to_table(step: int, scores: TokenScores) -> pa.Table:
    offsets = np.concatenate(([0], np.cumsum(scores.lengths))).astype(np.int32)
    starts = offsets[:-1]
    gap = np.abs(scores.proximal_logprobs - scores.behavior_logprobs)
    columns = {
        "step": np.full(len(scores.number), step),
        "number": scores.number,
        "index": scores.index,
        "largest_gap": np.maximum.reduceat(np.where(scores.mask, gap, 0), starts),
        "marked": np.add.reduceat((scores.mask & (scores.marks != 0)).astype(np.int32), starts),
    }
    arrays = {
        name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(getattr(scores, name), type))
        for name, type in _LISTS.items()
    }
    columns = {
        name: pa.array(values, TOKEN_SCHEMA.field(name).type) for name, values in columns.items()
    }
    return pa.Table.from_arrays(
        [(columns | arrays)[f.name] for f in TOKEN_SCHEMA], schema=TOKEN_SCHEMA
    )
